"""Titans' neural memory: values, states, gradients, and its special cases."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  TitansState,
  definitions,
  delta_rule_attention,
  titans,
  titans_attention,
)
from attention.mechanism import Dims
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS, VALUE

SIZE = 6
BOTH = [
  partial(function, minibatch_size=SIZE)
  for function in (titans_attention, definitions.titans_attention)
]


def given(length):
  """Arrays with a first state, whose examples are at different places."""
  rng = np.random.default_rng(3)
  shape, state = (BATCH, length, HEADS), (BATCH, HEADS, DIM, VALUE)
  arrays = cases.arrays(
    length,
    learning_rate=rng.uniform(0.0, 0.1, size=shape),
    log_momentum=-rng.exponential(0.7, size=shape),
    initial_state=TitansState(
      *(rng.normal(size=state) for _ in range(3)), np.array([2, SIZE], np.int32)
    ),
  )
  if length > 40:
    arrays["log_momentum"][:, 20:22], arrays["log_momentum"][:, 33] = 0.0, -60.0
  return arrays


def naive(given, mask, segment_ids):
  """Position by position, to be differentiated in float64."""

  def step(state, now):
    q, k, v, theta, m, g, seen, begin = now
    state = cases.where(begin, jax.tree.map(jnp.zeros_like, state), state)
    memory, momentum, start, count = state
    is_full = count == SIZE
    start = cases.where(is_full, memory, start)
    count = jnp.where(is_full, 0, count)

    def loss(memory):
      error = jnp.einsum("bnhv,bnh->bnv", memory, k) - v
      return jnp.sum(theta[..., None] * error**2)

    momentum = jnp.exp(m)[..., None, None] * momentum - jax.grad(loss)(start)
    memory = jnp.exp(g)[..., None, None] * memory + momentum
    after = TitansState(memory, momentum, start, count + 1)
    state = cases.where(seen, after, state)
    return state, jnp.einsum("bnhv,bnh->bnv", state[0], q) / DIM**0.5

  names = "learning_rate", "log_momentum", "log_decay"
  gates = [given[name] for name in names]
  return cases.by_position(step, given, gates, mask, segment_ids)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


def test_all_gradients():
  cases.assert_gradients(*BOTH, naive, given(150))


@pytest.mark.parametrize("size", [1, 64, 100])
def test_mini_batches_of_one_position_and_longer_than_a_chunk(size):
  arrays, more = given(150), cases.options(150)
  del arrays["initial_state"]
  run, definition = (partial(f, minibatch_size=size) for f in BOTH)
  found = cases.compiled(run)(arrays | more)
  expected = definition(**arrays, **more, return_state=True)
  cases.assert_values(found, expected, 5e-6)


def test_without_momentum_it_is_the_gated_delta_rule():
  """With mini-batches of one position: β = 2θ, and the value is read undecayed."""
  arrays = given(150)
  del arrays["initial_state"]
  arrays["log_momentum"] = np.full_like(arrays["log_momentum"], -1e4)
  found = titans_attention(**arrays, minibatch_size=1)
  rate, decay = arrays.pop("learning_rate"), arrays["log_decay"]
  del arrays["log_momentum"]
  key = np.repeat(arrays["key"], HEADS // KV_HEADS, axis=2)
  expected = delta_rule_attention(
    **arrays | {"key": key, "erase_key": key}, beta=2.0 * rate
  )
  assert decay.min() < -1.0
  assert_close(found, expected, 1e-6)


def test_a_new_layer_forgets_little():
  """Without inputs, a gate is the sigmoid of its bias: of 0, 0 and 4."""
  mechanism, dims = titans(max_rate=0.3), Dims(2, 2, 4, 9, 6)
  variables = mechanism.init(jax.random.key(0), dims)
  gates = mechanism.gates(variables, np.zeros((1, 3, 6), np.float32))
  # The logarithms of 1/2 and of 1/(1 + e^-4).
  expected = {"learning_rate": 0.15, "log_momentum": -0.693147}
  expected["log_decay"] = -0.0181499
  assert gates.keys() == expected.keys()
  for name, x in gates.items():
    np.testing.assert_allclose(x, np.full((1, 3, 2), expected[name]), rtol=1e-5)


def test_extreme_gates_stay_finite():
  arrays = given(150)
  for low in (-1e4, -90.0, 0.0):
    arrays["log_decay"][:], arrays["log_momentum"][:] = low, min(low, -0.1)
    cases.assert_finite(*BOTH, arrays)


def test_wrong_arguments_are_refused():
  arrays = given(9)
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]
  state = arrays["initial_state"]

  def call(**options):
    return titans_attention(*qkv, **arrays | options)

  assert_refused(
    call,
    (
      (
        "initial_state: expected a TitansState",
        {"initial_state": state._replace(start=state.start[:, :1])},
      ),
      ("minibatch_size: expected", {"minibatch_size": 0}),
      ("log_decay: expected", {"log_decay": arrays["log_decay"][:, :3]}),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
  wrong = [("max_rate: expected", {"max_rate": 0.0})]
  assert_refused(ATTENTIONS["titans"], wrong)
