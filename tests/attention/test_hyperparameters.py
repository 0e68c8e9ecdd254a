"""Every factory refuses a hyperparameter that cannot be meant, by its name."""

import inspect
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import ATTENTIONS, Dims, gates_from_keys
from docs import options
from tests.attention import defaults
from tests.attention.calls import normal

DIMS = Dims(
  num_heads=8, num_kv_heads=8, head_dim=64, max_length=2**20, features=512
)
WRONG = ("3", 3.5, math.inf, math.nan, [3.5], -1)


def of_kind(fits):
  """Names of factories and options whose default is of a kind."""
  return [
    (name, option)
    for name, factory in ATTENTIONS.items()
    for option, parameter in inspect.signature(factory).parameters.items()
    if fits(option, parameter.default)
  ]


def is_number(option, default):
  named = option in ("block_size", "num_buckets", "conv_kernel_size")
  return named or (isinstance(default, int) and not isinstance(default, bool))


@pytest.mark.parametrize(("name", "option"), of_kind(is_number))
def test_a_number_of_the_wrong_kind_is_refused(name, option, unchecked):
  factory = ATTENTIONS[name]
  default = inspect.signature(factory).parameters[option].default
  for value in (*WRONG, True, *([] if default is None else [None])):
    with pytest.raises(ValueError, match=f"^{option}: expected"):
      factory(**{option: value})


FORGETTING = [
  (name, {"forget": True})
  for name, factory in ATTENTIONS.items()
  if "forget" in inspect.signature(factory).parameters
]


@pytest.mark.parametrize(
  ("name", "given"), [*((name, {}) for name in ATTENTIONS), *FORGETTING]
)
def test_a_record_that_reads_inputs_refuses_to_have_none(name, given):
  record = ATTENTIONS[name](**given)

  def init(key):
    return record.init(key, DIMS._replace(features=0))

  if record.gates is None:
    jax.eval_shape(init, jax.random.key(0))
  else:
    with pytest.raises(ValueError, match=r"^features: .* least 1, got 0$"):
      init(jax.random.key(0))


@pytest.mark.parametrize(
  ("name", "option"), of_kind(lambda _, x: isinstance(x, float))
)
def test_a_fraction_is_a_finite_number(name, option, unchecked):
  for value in ("0.5", math.inf, math.nan, [0.5], None, True):
    with pytest.raises(ValueError, match=f"^{option}: expected"):
      ATTENTIONS[name](**{option: value})


@pytest.mark.parametrize(
  ("name", "option"), of_kind(lambda _, x: isinstance(x, bool))
)
def test_a_flag_is_true_or_false(name, option, unchecked):
  for value in ("False", 0, None, math.nan):
    with pytest.raises(
      ValueError, match=f"^{option}: expected True(,| or) False"
    ):
      ATTENTIONS[name](**{option: value})


_ABOVE_0 = (), (0.0, -1.0)
_NSA = {"compress_size": 8, "stride": 4, "block_size": 8, "window": 8}


@pytest.mark.parametrize(
  ("name", "option", "others", "accepted", "refused"),
  [
    ("lightning", "depth", {}, (0.0, 1.0, 1), (-0.1, 1.1)),
    ("gated_linear", "temperature", {}, *_ABOVE_0),
    ("gsa", "temperature", {}, *_ABOVE_0),
    ("hgrn2", "lower_bound", {}, (0.0, 0.9), (-0.1, 1.0)),
    ("kimi_delta", "lower_bound", {}, (-0.1,), (0.0, 0.1)),
    ("mamba2", "min_step", {"max_step": 0.5}, (0.0, 0.5), (-0.1, 0.6)),
    ("mamba", "norm_epsilon", {}, *_ABOVE_0),
    ("mamba3", "rotary_fraction", {}, (0.1, 1.0), (0.0, 1.1)),
    ("mesa", "min_regularizer", {}, (0.0,), (-0.1, 1.0)),
    ("mlstm", "epsilon", {}, (0.0,), (-0.1,)),
    ("mlstm", "gate_soft_cap", {}, (3, 0.1), (0.0, -1.0, math.inf, True)),
    ("precond_delta", "squash", {}, (1.0, 2.0), (0.9, 2.1)),
    ("gka", "ridge_ratio", {}, *_ABOVE_0),
    ("titans", "max_rate", {}, (3.0,), (0.0, -1.0)),
    ("ttt_linear", "base_rate", {}, *_ABOVE_0),
    *(
      (name, "max_rate", {}, (0.1, 2.0), (0.0, 2.1))
      for name in ("delta", "gated_delta_2", "delta_product")
    ),
    ("differential", "start", {}, (0.0, 0.9), (-0.1, 1.0)),
    ("window_2d", "shift", {"window": 3}, (0, 2), (-1, 3)),
    ("nystrom", "conv_kernel_size", {}, (1, 3), (0, 2, 4)),
    ("log_linear", "num_levels", {}, (2,), (1,)),
    ("nsa", "num_blocks", _NSA, (3,), (2,)),
    ("compressed", "rotary_dim", {}, (2,), (1, 3)),
    ("compressed", "top_k", {"stride": 0}, (), (2,)),
    *(
      ("compressed", option, {}, (), (2,))
      for option in ("num_index_heads", "index_dim", "query_rank")
    ),
    ("dsa", "index_dim", {}, (4, 8), (2, 6)),
    ("dsa", "index_rotary_dim", {"index_dim": 6}, (2, 6), (3, 8)),
    ("moba", "local_blocks", {}, (1,), (0, 2)),
    ("moba", "index_norm_epsilon", {}, (), (0.1,)),
    ("moba", "index_rotary_dim", {}, (), (2,)),
    ("lsh", "num_buckets", {}, (1, 2, 4), (3, 5)),
    ("flash", "block_size", {}, (3, (3, 5)), (0, (3,), (3, 5, 7), (3, 0))),
    ("flash", "logits_soft_cap", {}, (3, 0.1), (0.0, math.inf, True)),
  ],
)
def test_both_sides_of_each_bound(name, option, others, accepted, refused):
  factory = ATTENTIONS[name]
  for value in accepted:
    factory(**others, **{option: value})
  for value in refused:
    with pytest.raises(ValueError, match=f"^{option}: expected .* got"):
      factory(**others, **{option: value})


def test_values_of_numpy_are_those_of_python():
  for name, option, value in (
    ("performer", "num_features", np.int32(16)),
    ("flash", "block_size", np.int64(16)),
    ("flash", "logits_soft_cap", np.float32(0.5)),
    ("dense", "forget", np.bool_(True)),
    ("dense", "sinks", np.bool_(True)),
  ):
    factory = ATTENTIONS[name]
    assert factory(**{option: value}) is factory(**{option: value.item()})


def test_other_hyperparameters_of_the_wrong_kind(unchecked):
  for name, option in (
    ("performer", "kernel"),
    ("linear", "feature_map"),
    ("flash", "implementation"),
    ("sliding_window", "implementation"),
    ("mamba2", "implementation"),
  ):
    for value in (3, math.nan, ["relu"], "nosuch"):
      with pytest.raises(ValueError, match=f"^{option}: expected"):
        ATTENTIONS[name](**{option: value})
  for dilation in ([], [2, 0]):
    with pytest.raises(ValueError, match=r"^dilation: expected"):
      ATTENTIONS["sliding_window"](dilation=dilation)


@pytest.mark.parametrize(
  ("name", "given", "option"),
  [
    ("linformer", {"rank": 10**9}, "rank"),
    ("sliding_window", {"window": 10**9}, "window"),
  ],
)
def test_a_size_that_saves_nothing_is_refused(name, given, option):
  record = ATTENTIONS[name](**given)
  with pytest.raises(ValueError, match=f"^{option}: .*1000"):
    jax.eval_shape(lambda key: record.init(key, DIMS), jax.random.key(0))


@pytest.mark.parametrize(
  ("name", "given"),
  [
    ("bigbird", {"block_size": 2, "num_random": 10**9}),
    ("bigbird", {"block_size": 10**9}),
    ("lsh", {"chunk_size": 10**9}),
    ("nystrom", {"num_landmarks": 10**9}),
    ("flash", {"block_size": 10**9}),
    ("window_2d", {"window": 100, "hidden_logit": -100.0}),
    ("window_2d", {"window": 10**9, "relative": False}),
    ("sliding_window", {"window": 0, "dilation": 10**9}),
    ("sliding_window", {"window": 2, "dilation": (1, 10**12)}),
  ],
)
def test_a_size_beyond_the_length_costs_what_the_length_does(name, given):
  dims = Dims(2, 2, 4, 12, 8)
  (x,) = normal((1, 12, 2, 4))
  record = gates_from_keys(ATTENTIONS[name](**given))
  key = None if "shared_qk" in record.supports else x

  @jax.jit
  def run(rng):
    variables = record.init(rng, dims)
    outs = [record.apply(variables, x, key, x)]
    if "decode" in record.supports:
      cache = record.init_cache(variables, 1, 12, dims, jnp.float32)
      rows = (None if y is None else y[:, :1] for y in (x, key, x))
      outs.append(record.decode(variables, cache, *rows)[0])
    return outs

  for out in run(jax.random.key(1)):
    assert np.isfinite(out).all()


def test_options_of_a_call_and_of_a_config():
  (row,) = [x for x in options.page().splitlines() if "`performer`" in x]
  assert "`projection`, `kernel='softmax'`" in row
  assert (
    "| `num_features=256`, `kernel='softmax'` | `num_features=128` |" in row
  )


def test_defaults_are_those_written_down():
  """A config that names no value of an option has its default: the module that wrote
  the file says how to write a new one."""
  kept = pathlib.Path(defaults.__file__).with_suffix(".txt").read_text("utf-8")
  assert [*defaults.rows()] == kept.splitlines()


def test_what_is_typed_wrongly_is_named():
  with pytest.raises(ValueError, match=r"num_feature: performer has no .*mean"):
    attention.performer(num_feature=8)
  with pytest.raises(ValueError, match=r"^dropout_rate: dense has no such op"):
    attention.dense(dropout_rate=0.1)
  with pytest.raises(KeyError, match=r"unknown 'linfomer'; .* 'linformer'"):
    ATTENTIONS["linfomer"]
  assert "linfomer" not in ATTENTIONS
  assert ATTENTIONS.get("linfomer") is None
  arrays = [jnp.ones((1, 8, 1, 4))] * 3
  with pytest.raises(
    ValueError, match=r"variables: linformer needs .*'params'"
  ):
    attention.linformer(rank=4).apply({}, *arrays)
