"""A mechanism of another project is named by its import path."""

import re

import pytest

from attention import Attention
from attention import mechanism as mechanisms
from attention.names import no_imports
from models.attention_config import AttentionConfig

MODULE = """
from attention import Attention, dense

CONSTANT = 3
RECORD = dense()


def plain(width=2, *, steps: int, rate: float | None = None) -> Attention:
  if width < 1:
    raise ValueError(f"width: expected at least 1, got {width}")
  if width > 99:
    raise ValueError("too wide")
  return dense()._replace(cost="linear")


def any_option(**options) -> Attention:
  return dense()


def bare_attention(query, key, value):
  return value


def failing() -> Attention:
  raise RuntimeError("out of\\nluck")


def deep() -> Attention:
  import jax.numpy as jnp
  return jnp.ones(2) + jnp.ones(3)


def unscaled(scale=None) -> Attention:
  import jax.numpy as jnp
  return jnp.ones(2) * scale


def quoted() -> "attention.Attention":
  return dense()


def bare():
  raise AssertionError("was called")


def array() -> "Array":
  raise AssertionError("was called")


def pair() -> Attention:
  return 1, 2


def listed() -> Attention:
  return dense()._replace(supports=["mask"])


def misspelt() -> Attention:
  return dense()._replace(supports=frozenset({"casual"}))


def claiming() -> Attention:
  return dense()._replace(decode=None)


def uncached() -> Attention:
  return dense()._replace(init_cache=None)


def short_attention(q, k, v) -> Attention:
  return v


def several(*widths, **options) -> Attention:
  return dense()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  """Two modules of another project, in a package: one works, one does not."""
  folder = tmp_path / "their_package"
  folder.mkdir()
  (folder / "__init__.py").write_text("")
  (folder / "mine.py").write_text(MODULE)
  (folder / "lacking.py").write_text("import nosuch_dependency\n")
  (folder / "wrong.py").write_text("\n1 / 0\n")
  monkeypatch.syspath_prepend(tmp_path)


def test_a_factory_is_found_by_name_and_by_path():
  assert mechanisms.find("dense") is mechanisms.ATTENTIONS["dense"]
  factory = mechanisms.find("their_package.mine:plain")
  assert factory(steps=1).cost == "linear"
  record = mechanisms.build("their_package.mine:plain", {"steps": 3})
  assert isinstance(record, Attention)
  assert mechanisms.example("their_package.mine:plain").cost == "linear"
  mechanisms.build("their_package.mine:any_option", {"whatever": 3})
  mechanisms.build("their_package.mine:several", {})
  # An int is a float, and None is what the annotation says.
  for rate in (3, 0.5, None):
    mechanisms.build("their_package.mine:plain", {"steps": 3, "rate": rate})
  mechanisms.build("their_package.mine:quoted", {})


MINE = "their_package.mine:"
FAULTS = [
  ("performr", {}, "name: unknown 'performr'; did you mean 'performer'\\?$"),
  ("plain", {}, "name: expected one of .*, package.module:factory, got"),
  ("nosuch:plain", {}, "name: no module named 'nosuch'; .* PYTHONPATH"),
  ("their_package.mien:plain", {}, "name: no module named 'their_package.mien'"),
  ("their_package/mine.py:plain", {}, "name: expected package.module:factory"),
  (":plain", {}, "name: expected package.module:factory"),
  (MINE, {}, "name: expected package.module:factory"),
  ("their_package.lacking:plain", {},
   "name: importing their_package.lacking raised ModuleNotFoundError: .*"
   r"nosuch_dependency.*lacking.py:1\)"),
  ("their_package.wrong:plain", {},
   r"name: importing .* raised ZeroDivisionError: .*wrong.py:2\)"),
  (MINE + "plian", {}, "name: module 'their_package.mine' has no 'plian'; did yo"),
  (MINE + "CONSTANT", {}, "name: .* is of type int"),
  (MINE + "RECORD", {}, "name: .* is of type Attention"),
  *(
    (name, options, "name: '.*' is a module of Python itself")
    for name, options in (
      ("os:system", {"command": "exit 3"}),
      ("subprocess:Popen", {"args": ["false"]}),
      ("importlib.metadata:version", {"distribution_name": "jax"}),
      ("antigravity:dense", {}),
      ("builtins:dict", {}),
    )
  ),
  (MINE + "bare", {}, "name: .*:bare is not annotated `-> Attention`"),
  (MINE + "array", {}, "name: .*:array is not annotated `-> Attention`"),
  (MINE + "bare_attention", {}, "name: .* takes a query, as an "),
  (MINE + "failing", {},
   r"name: .*:failing raised RuntimeError: out of luck .*mine.py:\d+\)"),
  # The line of theirs, not of JAX.
  *(
    (MINE + name, {}, rf"name: .*:{name} raised TypeError: .*mine.py:\d+\)")
    for name in ("deep", "unscaled")
  ),
  (MINE + "pair", {}, "name: .*:pair returned a tuple; expected"),
  (MINE + "listed", {}, "name: the `supports` of .* is a list"),
  (MINE + "misspelt", {}, "name: .* did you mean 'causal'"),
  (MINE + "claiming", {}, "name: .* its init_cache or decode is"),
  (MINE + "uncached", {}, "name: .* its init_cache or decode is"),
  (MINE + "short_attention", {}, "name: .* takes a query, as an "),
  (MINE + "plain", {}, "steps: .*:plain needs it, got nothing"),
  *(
    (MINE + "plain", options, message)
    for options, message in (
      ({"step": 1}, "step: .* has no such option; .*did you mean 'steps'"),
      ({"steps": 1, "width": 0}, "width: expected at least 1, got 0"),
      ({"steps": 1, "width": 100}, "name: .*:plain raised ValueError: too wide"),
      ({"steps": 1, "width": "x"}, "name: .*:plain raised TypeError"),
      ({"steps": 1, "rate": "abc"}, "rate: expected float or int or None, got 'a"),
    )
  ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), FAULTS)
def test_a_fault_is_one_line_that_names_the_leaf(name, options, message):
  with pytest.raises(ValueError) as error:
    mechanisms.build(name, options)
  assert re.match(message, str(error.value))
  assert "\n" not in str(error.value)


def test_within_data_no_import_path_is_followed():
  """Neither a new one, nor one that was imported before."""
  chosen = AttentionConfig("their_package.mine:plain", {"steps": 1})
  with no_imports():
    # Importing it would say that it divides by zero.
    for name in ("their_package.wrong:plain", "their_package.mine:plain"):
      with pytest.raises(
        ValueError, match="a folder of weights imports nothin"
      ):
        mechanisms.build(name, {"steps": 1})
    with pytest.raises(ValueError, match="is an import path"):
      AttentionConfig("their_package.mine:plain", {"steps": 1})
    assert mechanisms.build("dense", {}).supports
  chosen.build()
