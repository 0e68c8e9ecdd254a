"""What a user types becomes frozen dataclasses, or one clear line."""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pydantic
import pytest

from models import ModelConfig
from models.attention_config import AttentionConfig, Layers
from settings import errors, fields
from settings.build import build as build_config
from settings.build import to_mapping
from settings.errors import ConfigError
from settings.field_values import put
from settings.fields import rest
from training.config import OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Plug:
  name: str
  options: Mapping[str, Any]

  _rest = rest("options")


@dataclasses.dataclass(frozen=True)
class Everything:
  count: int
  rate: float = 1.0
  flag: bool = False
  span: int | tuple[int, int] = 3
  names: tuple[str, ...] = ()
  plug: Plug | None = None

  def __post_init__(self):
    if self.count > 9:
      raise ValueError(f"count: expected at most 9, got {self.count}")


def build(**leaves):
  return build_config(Everything, ConfigDict(leaves))


def test_values_arrive_with_their_types():
  built = build(
    count=2,
    rate=3,
    span=[1, 2],
    names=["a", "b"],
    plug={"name": "x", "window": 4},
  )
  assert built.rate == 3.0
  assert isinstance(built.rate, float)
  assert built.span == (1, 2)
  assert built.names == ("a", "b")
  assert built.plug.options == {"window": 4}
  with pytest.raises(dataclasses.FrozenInstanceError):
    built.count = 3


def test_values_of_python_libraries_are_plain_ones():
  built = build_config(
    Everything,
    {
      "count": np.int64(2),
      "rate": jnp.float32(0.5),
      "flag": np.bool_(True),
      "span": range(3, 5),
      "names": np.array(["a", "b"]),
      "plug": {"name": pathlib.Path("x/y"), "scale": np.float32(0.1)},
    },
  )
  plug = Plug("x/y", {"scale": 0.10000000149011612})  # The nearest float32.
  assert built == Everything(2, 0.5, True, (3, 4), ("a", "b"), plug)
  json.dumps(to_mapping(built))


def test_round_trip_through_json():
  built = build(count=2, span=(1, 2), plug={"name": "x", "window": (4, 0)})
  text = json.dumps(to_mapping(built))
  again = build_config(Everything, json.loads(text))
  assert json.dumps(to_mapping(again)) == text
  assert again.plug.name == "x"


@pytest.mark.parametrize(
  ("leaves", "fault"),
  [
    ({"rat": 2.0}, "rat: unknown; did you mean 'rate'?"),
    ({"count": "1"}, "count: expected a valid integer, got '1'"),
    ({"count": True}, "count: expected a valid integer, got True"),
    ({"count": 1.0}, "count: expected a valid integer, got 1.0"),
    ({"count": 10}, "count: expected at most 9, got 10"),
    ({"flag": 1}, "flag: expected a valid boolean, got 1"),
    ({"rate": float("nan")}, "rate: expected a finite number, got nan"),
    ({"rate": float("inf")}, "rate: expected a finite number, got inf"),
    (
      {"rate": 1e300},
      "rate: expected a number in the range of float32, got 1e+300",
    ),
    (
      {"rate": 1e-46},
      "rate: expected a number in the range of float32, got 1e-46",
    ),
    (
      {"rate": 10**400},
      "rate: expected a number in the range of float32, got 1000",
    ),
    ({"span": (1, 2, 3)}, "span: expected a valid integer, got [1, 2, 3]"),
    ({"plug": 3}, "plug: expected named fields, got 3"),
    ({"plug": {"a": 3}}, "plug.name: missing"),
    ({"names": "a"}, "names: expected a list, got 'a'"),
    ({"names": [1]}, "names[0]: expected a valid string, got 1"),
    ({"names": 3}, "names: expected a list, got 3"),
    ({"a\nb": 2}, "a b: unknown; known: count, rate, flag, span, names, plug"),
    # Sections that nobody knows are named down to their leaf.
    ({"plg": {"window": 2}}, "plg.window: unknown; did you mean 'plug'?"),
  ],
)
def test_faults_are_one_line(leaves, fault):
  with pytest.raises(ConfigError) as info:
    build(**{"count": 1, **leaves})
  assert str(info.value).startswith(f"config.{fault}")
  assert "\n" not in str(info.value)


def test_numbers_are_those_of_float32():
  """Normal ones: XLA may take smaller numbers for 0."""
  tiny, end = 2.0**-126, 2.0**128
  for value in (0.0, tiny, -tiny, end * (1 - 2.0**-24), 2**127):
    assert build(count=1, rate=value).rate == value
  for value in (tiny / 2, -tiny / 2, end, -end, 2**128, -(2**128)):
    with pytest.raises(ConfigError, match=r"^config.rate: .* range of float32"):
      build(count=1, rate=value)


@pytest.mark.parametrize(
  ("kind", "allowed", "refused"),
  [
    (fields.Count, [1], [0]),
    (fields.Whole, [0], [-1]),
    (fields.Positive, [1e-30], [0.0, -1.0]),
    (fields.Rate, [0.0, 0.999], [-0.001, 1.0]),
    (fields.Share, [0.001, 0.999], [0.0, 1.0]),
    (fields.Whole32, [0, 2**31 - 1], [-1, 2**31]),
    (fields.Count32, [1, 2**31 - 1], [0, 2**31]),
  ],
)
def test_both_ends_of_each_type(kind, allowed, refused):
  adapter = pydantic.TypeAdapter(kind)
  for value in allowed:
    assert adapter.validate_python(value) == value
  for value in refused:
    with pytest.raises(ValueError):
      adapter.validate_python(value)


def test_a_part_of_a_name_that_is_a_value_has_no_fields():
  mapping = {"a": {"b": 1}}
  put(mapping, "a.c.d", 2)
  assert mapping == {"a": {"b": 1, "c": {"d": 2}}}
  with pytest.raises(ConfigError) as info:
    put(mapping, "a.b.e", 3)
  assert str(info.value) == (
    "config.a.b.e: unknown; config.a.b is one value and has no fields"
  )


def test_a_message_is_one_line_of_what_can_be_seen():
  line = "a" * 500 + "b" * 500
  assert errors.one_line(ValueError(line)) == line
  shortened = errors.one_line(ValueError(f"{line[:500]}-{line[500:]}"))
  assert shortened == f"{line[:500]} … {line[500:]}"
  assert errors.one_line(KeyError("a\n 'b'")) == "a 'b'"
  assert errors.one_line(OSError()) == "OSError"
  assert errors.escape("\0\x1f \n\t\x7e\x7f\x9f\xa0") == (
    r"\x00\x1f" " \n\t~" r"\x7f\x9f" "\xa0"
  )


def test_a_leaf_without_a_default_is_missed():
  with pytest.raises(ConfigError, match=r"^config.count: missing, and it has "):
    build(rate=1.0)


def test_what_fills_a_screen_is_shortened():
  with pytest.raises(ConfigError) as info:
    build(count="x" * 10_000)
  assert str(info.value).startswith(
    "config.count: expected a valid integer, got 'xxx"
  )
  assert len(str(info.value)) < 1100


def test_a_name_is_text():
  with pytest.raises(ConfigError, match=r"^config: expected fields named by "):
    build_config(Everything, {"count": 1, 3: 2})


@pytest.mark.parametrize(
  ("leaves", "message"),
  [
    ({"learning_rate": 0.0}, "learning_rate: expected greater than 0, got 0.0"),
    (
      {"schedule": "x"},
      "schedule: expected 'constant', 'cosine' or 'inverse_sq",
    ),
    ({"b2": 1.0}, "b2: expected less than 1, got 1.0"),
    ({"clip_norm": -1.0}, "clip_norm: expected greater than 0, got -1.0"),
    (
      {"warmup_steps": 2**31},
      "warmup_steps: expected less than 2147483648, go",
    ),
    ({"accumulate_steps": 3}, "batch_size: 8 rows do not split into 3"),
  ],
)
def test_optimizer_values_are_checked(leaves, message):
  with pytest.raises(ConfigError, match=r"config\.") as info:
    build_config(
      TrainConfig, {"num_steps": 1, "batch_size": 8, "optimizer": leaves}
    )
  assert message in str(info.value)


def test_what_python_makes_is_checked_too():
  config = OptimizerConfig()
  assert hash(config) == hash(OptimizerConfig())
  with pytest.raises(ValueError, match=r"b1\n.* less than 1 "):
    dataclasses.replace(config, b1=1.5)


def test_defaults_are_valid():
  assert TrainConfig(num_steps=1, batch_size=1).optimizer == OptimizerConfig()


def test_words_choose_by_name():
  @dataclasses.dataclass(frozen=True)
  class Model:
    slot: Layers | None = None

  a, b = AttentionConfig("dense"), AttentionConfig("linear")
  wide = {"name": "sliding_window", "window": 2}
  for words, expected in (
    ("dense", a),
    ("[dense, linear]", (a, b)),
    (["dense", wide], (a, AttentionConfig("sliding_window", {"window": 2}))),
    ("[dense]", (a,)),
    (
      "sliding_window:window=2",
      AttentionConfig("sliding_window", {"window": 2}),
    ),
    (
      "[dense, sliding_window:window=(2, 0)]",
      (a, AttentionConfig("sliding_window", {"window": (2, 0)})),
    ),
  ):
    assert build_config(Model, {"slot": words}, "config").slot == expected
  for chosen, fault in (
    (3, r"slot: expected named fields, got 3"),
    (
      "dense,linear",
      r"slot: several names are a list; expected \[dense,linear\]",
    ),
    ("dens", r"slot.name: unknown 'dens'; did you mean 'dense'"),
    (["dense", "linea"], r"slot\[1\].name: unknown 'linea'"),
    ("lsh:chunk_size=8:x", r"slot: expected name:option=value:option=value"),
    ("[dense,lsh:chunk=8]", r"slot\[1\].chunk: lsh has no such option"),
    (["dense", {"window": 2}], r"slot\[1\].name: missing"),
  ):
    with pytest.raises(ConfigError, match=f"^config.{fault}"):
      build_config(Model, {"slot": chosen}, "config")


@pytest.mark.parametrize(
  ("typed", "leaf"),
  [
    ({"value_dim": 0}, "value_dim"),
    ({"slot": {"value_dim": 0}}, "slot.value_dim"),
  ],
)
def test_a_section_is_named_where_it_was_typed(typed, leaf):
  mapping = {"slot": {"value_dim": 0}, "kind": "decoder"}
  with pytest.raises(ConfigError, match=f"^config.{leaf}: expected at least 1"):
    build_config(ModelConfig, mapping, typed=ConfigDict(typed))
