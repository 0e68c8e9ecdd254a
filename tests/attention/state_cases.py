"""Cases of functions with a state: float32 arguments and definitions."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attention
from attention import definitions
from attention.log_linear import LevelState
from tests.attention import calls

BATCH, HEADS, KV_HEADS, DIM, VALUE = 2, 4, 2, 8, 5
SLOTS, LEVELS, WRITES, SIZE = 7, 10, 3, 6
"""Slots of GSA, levels of log-linear attention, updates of DeltaProduct, mini-batch."""


class StateCase(NamedTuple):
  """A function with a state, and the arrays of its calls.

  Attributes:
    name: the mechanism, with the form of its decays after a dash.
    function: the function with its options.
    definition: its definition with the same options.
    given: length -> arrays by name, with an initial state.
  """

  name: str
  function: Callable[..., Any]
  definition: Callable[..., Any]
  given: Callable[[int], dict[str, Any]]

  @property
  def mechanism(self) -> str:
    """The name without the form of decays."""
    return self.name.partition("-")[0]

  def __repr__(self) -> str:
    return self.name


def arrays(length, channels=(), **more):
  """Draws arrays of a call; long ones have decays of 1, e⁻³⁰ and e⁻⁶⁰."""
  rng = np.random.default_rng(0)

  def unit(heads):
    x = rng.normal(size=(BATCH, length, heads, DIM))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  drawn = {
    "query": unit(HEADS),
    "key": unit(KV_HEADS),
    "value": rng.normal(size=(BATCH, length, KV_HEADS, VALUE)),
    "log_decay": -rng.exponential(0.15, size=(BATCH, length, HEADS, *channels)),
  }
  if length > 40:
    drawn["log_decay"][:, 10:13] = 0.0
    drawn["log_decay"][:, 30], drawn["log_decay"][:, 33] = -60.0, -30.0
    drawn["key"][:, 34:38] = drawn["key"][:, 34:35]  # Repeated keys.
  return jax.tree.map(as_float32, drawn | more)


def as_float32(x):
  is_float = np.issubdtype(np.asarray(x).dtype, np.floating)
  return np.asarray(x, np.float32 if is_float else None)


def rule_arrays(rule, form, length):
  """Draws arrays of a rule; `comba` and `gates` have separate erase keys."""
  rng = np.random.default_rng(7)
  shape = BATCH, length, HEADS
  beta = rng.uniform(size=shape)
  if length > 40:
    beta[:, 20], beta[:, 21] = 0.0, 1.0
  state = rng.normal(size=(BATCH, HEADS, DIM, VALUE))
  channels = (DIM,) if form == "channel" else ()
  given = arrays(length, channels, beta=beta, initial_state=state)
  if form == "none":
    del given["log_decay"]
  if rule in ("gated", "rwkv6", "rwkv7"):
    del given["beta"]
  if rule in ("gates", "comba"):
    erase_key = given["key"] + 0.3 * rng.normal(size=given["key"].shape)
    erase_key /= np.linalg.norm(erase_key, axis=-1, keepdims=True)
    given["erase_key"] = erase_key
  if rule == "gates":
    given["erase_gate"] = rng.uniform(size=(*shape, DIM))
    given["write_gate"] = rng.uniform(size=(*shape, VALUE))
  if rule == "product":
    for name in ("key", "value", "beta"):
      updates = [np.roll(given[name], r, axis=-1) for r in range(WRITES)]
      given[name] = np.stack(updates, axis=2)
  if rule == "rwkv6":
    given["bonus"] = rng.normal(size=(HEADS, DIM))
  if rule == "rwkv7":
    erase_key = rng.normal(size=(*shape, DIM))
    erase_key /= np.linalg.norm(erase_key, axis=-1, keepdims=True)
    given["removal"] = -erase_key
    given["replacement"] = beta[..., None] * erase_key
  return jax.tree.map(as_float32, given)


def mesa_arrays(length):
  """Draws arrays of MesaNet; the initial state has 20 positions."""
  rng = np.random.default_rng(3)
  key = rng.normal(size=(BATCH, HEADS, 20, DIM)) * DIM**-0.5
  value = rng.normal(size=(BATCH, HEADS, 20, DIM + VALUE))
  value[..., :DIM] = key
  return arrays(
    length,
    beta=rng.uniform(size=(BATCH, length, HEADS)),
    regularizer=0.25 + rng.exponential(size=(HEADS, DIM)),
    initial_state=np.swapaxes(key, -2, -1) @ value,
  )


def gka_arrays(length):
  """Draws arrays of MesaNet with a gate α instead of λ."""
  given = mesa_arrays(length)
  del given["regularizer"]
  given["beta"] += 0.05
  alpha = np.random.default_rng(4).uniform(size=given["beta"].shape)
  return given | {"alpha": np.float32(alpha)}


def gsa_arrays(length):
  """Draws arrays of GSA; some slots are erased at two positions."""
  rng = np.random.default_rng(3)
  decay = -rng.exponential(0.1, size=(BATCH, length, HEADS, SLOTS))
  if length > 40:
    decay[:, 10:13] = 0.0
    decay[:, 30, :, ::2], decay[:, 33] = -60.0, -30.0
  given = arrays(
    length,
    log_decay=decay,
    slot_weights=rng.uniform(size=decay.shape),
    initial_state=rng.normal(size=(BATCH, HEADS, SLOTS, DIM + VALUE)),
  )
  return given | {"query": 6.0 * given["query"]}


def level_state(count, shape=()):
  """Draws a state whose levels fit its number of positions."""
  shape = BATCH, *shape, HEADS, LEVELS - 1, DIM, VALUE
  sums = np.random.default_rng(3).normal(size=shape)
  is_filled = (count[..., None] >> np.arange(LEVELS - 1)) % 2 == 1
  sums = np.where(is_filled[..., None, :, None, None], sums, 0.0)
  return LevelState(np.float32(sums), count)


def log_linear_arrays(length):
  """Draws arrays of log-linear attention; initial states have 5 and 70 positions."""
  rng = np.random.default_rng(4)
  return arrays(
    length,
    level_scales=rng.uniform(size=(BATCH, length, HEADS, LEVELS)),
    initial_state=level_state(np.array([5, 70], np.int32)),
  )


def momentum_delta_arrays(length):
  """Draws arrays of Momentum DeltaNet, with momentum decays of 1 and e⁻⁵⁰."""
  rng = np.random.default_rng(3)
  shape = BATCH, length, HEADS
  momentum_decay = -rng.exponential(0.4, size=shape)
  if length > 40:
    momentum_decay[:, 12:15], momentum_decay[:, 36] = 0.0, -50.0
  return arrays(
    length,
    beta=rng.uniform(0.0, 0.6, size=shape),
    eta=rng.uniform(size=shape),
    momentum_decay=momentum_decay,
    initial_state=rng.normal(size=(BATCH, HEADS, 2 * DIM, VALUE)),
  )


def precond_delta_arrays(length, channels=()):
  """Draws arrays of preconditioned DeltaNet, with decays per head or channel."""
  rng = np.random.default_rng(3)
  shape = BATCH, length, HEADS
  return arrays(
    length,
    channels,
    beta=rng.uniform(size=shape),
    square_rate=rng.uniform(size=shape),
    square_decay=-rng.exponential(0.2, size=shape),
    center=rng.normal(size=HEADS),
    initial_state=attention.PrecondState(
      rng.normal(size=(BATCH, HEADS, DIM, VALUE)),
      rng.exponential(size=(BATCH, HEADS, DIM)),
    ),
  )


def titans_arrays(length):
  """Draws arrays of Titans, whose states are within and at the end of a mini-batch."""
  rng = np.random.default_rng(3)
  shape, state = (BATCH, length, HEADS), (BATCH, HEADS, DIM, VALUE)
  given = arrays(
    length,
    learning_rate=rng.uniform(0.0, 0.1, size=shape),
    log_momentum=-rng.exponential(0.7, size=shape),
    initial_state=attention.TitansState(
      *(rng.normal(size=state) for _ in range(3)), np.array([2, SIZE], np.int32)
    ),
  )
  if length > 40:
    given["log_momentum"][:, 20:22], given["log_momentum"][:, 33] = 0.0, -60.0
  return given


def ttt_linear_arrays(length):
  """Draws arrays of TTT-Linear, with states like those of `titans_arrays`."""
  rng = np.random.default_rng(3)
  model = BATCH, HEADS, DIM + 1, DIM
  given = arrays(
    length,
    value=rng.normal(size=(BATCH, length, KV_HEADS, DIM)),
    learning_rate=rng.uniform(0.0, 0.3, size=(BATCH, length, HEADS)),
    initial_weights=rng.normal(size=(HEADS, DIM, DIM)),
    initial_bias=rng.normal(size=(HEADS, DIM)),
    norm_scale=rng.normal(1.0, 0.3, size=(HEADS, DIM)),
    norm_bias=rng.normal(0.0, 0.3, size=(HEADS, DIM)),
    position_offset=rng.normal(0.0, 0.3, size=SIZE),
    initial_state=attention.TttState(
      rng.normal(size=model),
      0.1 * rng.normal(size=model),
      np.array([2, SIZE], np.int32),
    ),
  )
  del given["log_decay"]
  return given


def mlstm_arrays(length):
  """Draws arrays of mLSTM, with some gates far from 0."""
  rng = np.random.default_rng(0)
  shape = BATCH, length, HEADS
  log_input = 3.0 * rng.normal(size=shape)
  log_input[:, 3::11] = 60.0
  log_decay = -np.exp(2.0 * rng.normal(size=shape))
  log_decay[:, ::13] = -300.0
  state = attention.MlstmState(
    rng.normal(size=(BATCH, HEADS, DIM, VALUE)),
    rng.normal(size=(BATCH, HEADS, DIM)),
    5.0 * rng.normal(size=(BATCH, HEADS)),
  )
  gates = {"log_decay": log_decay, "log_input": log_input}
  return arrays(length, **gates, initial_state=state)


def mamba_arrays(length):
  """Draws arrays of Mamba: some steps erase the state; all heads share queries."""
  rng = np.random.default_rng(0)
  shape = BATCH, length, HEADS
  step = np.exp(rng.normal(size=(*shape, VALUE)))
  step[:, ::7] = 300.0
  given = arrays(
    length,
    query=rng.normal(size=(BATCH, length, 1, DIM)),
    key=rng.normal(size=(*shape, DIM)),
    value=rng.normal(size=(*shape, VALUE)),
    step=step,
    log_rate=rng.normal(size=(HEADS, DIM, VALUE)),
    initial_state=rng.normal(size=(BATCH, HEADS, DIM, VALUE)),
  )
  del given["log_decay"]
  return given


def rg_lru_arrays(length):
  """Draws arrays of RG-LRU, with decays near 0 and near 1."""
  rng = np.random.default_rng(0)
  shape = BATCH, length, HEADS, VALUE
  log_decay = -np.exp(2.0 * rng.normal(size=shape))
  log_decay[:, ::7] = -300.0
  given = {
    "value": rng.normal(size=shape),
    "log_decay": log_decay,
    "input_gate": rng.uniform(size=shape),
    "initial_state": rng.normal(size=(BATCH, HEADS, VALUE)),
  }
  return jax.tree.map(as_float32, given)


def _case(name, given, function=None, **options):
  """Returns a case; the function defaults to that of the mechanism."""
  function = f"{function or name.partition('-')[0]}_attention"
  functions = (getattr(x, function) for x in (attention, definitions))
  fast, definition = (
    partial(f, **options) if options else f for f in functions
  )
  if name == "gka":  # 80 iterations reach the exact solution.
    fast = partial(fast, num_iterations=80)
  return StateCase(name, fast, definition, given)


RULES = [
  _case(f"{rule}-{form}", partial(rule_arrays, rule, form), function, scale=0.7)
  for rule, form, function in (
    ("gated", "head", "gated_linear"),
    ("gated", "channel", "gated_linear"),
    ("delta", "head", "delta_rule"),
    ("delta", "channel", "delta_rule"),
    ("delta", "none", "delta_rule"),
    ("gates", "channel", "delta_rule"),
    ("product", "head", "delta_product"),
    ("rwkv7", "channel", "rwkv7"),
    ("comba", "head", "delta_rule"),
    ("rwkv6", "channel", "rwkv6"),
  )
]
_NORM = {"minibatch_size": SIZE, "epsilon": 1e-3, "scale": 0.8}
_CHANNEL_DECAYS = partial(precond_delta_arrays, channels=(DIM,))
OTHERS = [
  _case("mesa", mesa_arrays, scale=0.7),
  _case("gka", gka_arrays, scale=0.7, ridge_ratio=0.05),
  _case("gsa", gsa_arrays, scale=0.7),
  _case("log_linear", log_linear_arrays, scale=0.7),
  _case("momentum_delta", momentum_delta_arrays, scale=0.7),
  _case("precond_delta", precond_delta_arrays, squash=1.75, epsilon=0.01),
  _case("precond_delta-channel", _CHANNEL_DECAYS, scale=0.7),
  _case("titans", titans_arrays, minibatch_size=SIZE, scale=0.7),
  _case("ttt_linear", ttt_linear_arrays, **_NORM),
  _case("mlstm", mlstm_arrays, scale=0.7, epsilon=0.1),
  _case("mamba", mamba_arrays, scale=0.3),
  _case("rg_lru", rg_lru_arrays, scale=0.3),
]
CASES = {case.name: case for case in (*RULES, *OTHERS)}


def options(length):
  """Draws a key mask and segments of random lengths."""
  rng = np.random.default_rng(1)
  return {
    "mask": rng.random((BATCH, 1, 1, length)) < 0.8,
    "segment_ids": np.cumsum(rng.random((BATCH, length)) < 0.05, axis=1) % 3,
  }


def options_without_effect(length):
  """Returns a full mask and one segment, for programs with these arguments."""
  drawn = options(length)
  ids = np.zeros_like(drawn["segment_ids"])
  return {"mask": np.ones_like(drawn["mask"]), "segment_ids": ids}


def jit_with_state(function, **options):
  """Returns a compiled function of a dict of arrays that also returns the state."""
  return jax.jit(lambda given: function(**given, **options, return_state=True))


def has_positions(x, length):
  """Returns whether an argument is an array with a position axis."""
  return isinstance(x, np.ndarray) and x.shape[:2] == (BATCH, length)


def assert_values(results, expected, tolerance):
  """Asserts that arrays agree, relative to their largest value or 1."""
  for x, y in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
    bound = tolerance * max(1.0, np.abs(y).max())
    np.testing.assert_allclose(x, y, atol=bound, rtol=tolerance)


def assert_continues(case, length):
  """Asserts that two calls, the second with the state of the first, equal one."""
  given, run = case.given(2 * length), jit_with_state(case.function)
  first, second = (
    {
      n: x[:, half] if has_positions(x, 2 * length) else x
      for n, x in given.items()
    }
    for half in (slice(length), slice(length, None))
  )
  out, state = run(first)
  assert out.dtype == jax.tree.leaves(state)[0].dtype == jnp.float32
  second_out, state = run(second | {"initial_state": state})
  out = np.concatenate([out, second_out], axis=1)
  expected = case.definition(**given, return_state=True)
  assert_values((out, state), expected, 1e-5)


def assert_gradients(case, given, more, tolerance=2e-5, where=("cpu", "gpu")):
  """Asserts values, states and gradients, with NaN at masked positions."""
  length = more["mask"].shape[3]
  with_nan = jax.tree.map(np.array, given)
  for name, x in with_nan.items():
    if has_positions(x, length) and name != "query":
      x[~more["mask"][:, 0, 0]] = np.nan
  call = {**more, "return_state": True}
  calls.assert_defined(
    lambda given: case.function(**given, **call),
    lambda given: case.definition(**given, **call),
    given,
    spoiled=with_nan,
    where=where,
    tolerance=tolerance,
  )


def assert_finite(case, given, tolerance=2e-5):
  """Asserts the values and states of the definition, and finite gradients."""
  call = {
    **options_without_effect(given["value"].shape[1]),
    "return_state": True,
  }
  results, (gradients,) = calls.pulled(
    lambda given: case.function(**given, **call), given
  )
  assert_values(results, case.definition(**given, return_state=True), tolerance)
  for x in jax.tree.leaves(gradients):
    assert x.dtype == jax.dtypes.float0 or np.isfinite(x).all()
