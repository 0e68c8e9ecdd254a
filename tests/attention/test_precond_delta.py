"""Preconditioned DeltaNet: values, states, gradients, and its bounds."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  PrecondState,
  definitions,
  delta_rule_attention,
  precond_delta_attention,
)
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, VALUE

BOTH = precond_delta_attention, definitions.precond_delta_attention
SQUASHED = [partial(function, squash=1.75, epsilon=0.01) for function in BOTH]


def given(length, channels=()):
  """Arrays with a first state."""
  rng = np.random.default_rng(3)
  shape = BATCH, length, HEADS
  arrays = cases.arrays(
    length,
    beta=rng.uniform(size=shape),
    square_rate=rng.uniform(size=shape),
    square_decay=-rng.exponential(0.2, size=shape),
    center=rng.normal(size=HEADS),
    initial_state=PrecondState(
      rng.normal(size=(BATCH, HEADS, DIM, VALUE)),
      rng.exponential(size=(BATCH, HEADS, DIM)),
    ),
  )
  decay = arrays["log_decay"].reshape(*shape, *[1] * len(channels))
  arrays["log_decay"] = decay * np.ones(channels, np.float32)
  return arrays


def naive(given, mask, segment_ids):
  """Position by position, to be differentiated in float64."""
  decay = given["log_decay"].reshape(*given["beta"].shape, -1)

  def step(state, now):
    q, k, v, g, beta, a, r, seen, first = now
    first, seen = (x[:, None, None, None] for x in (first, seen))
    memory = jnp.where(first, 0.0, state.memory)
    squares = jnp.where(first[..., 0], 0.0, state.squares)
    new = jnp.exp(a)[..., None] * squares + r[..., None] * k**2
    rho = jnp.log(new + 0.01) - given["center"][None, :, None]
    written = k * 1.75 ** (-rho / (1.0 + jnp.abs(rho)))
    decayed = jnp.exp(g)[..., None] * memory
    error = beta[..., None] * (v - jnp.einsum("bnhv,bnh->bnv", decayed, k))
    after = decayed + written[..., None] * error[:, :, None]
    memory = jnp.where(seen, after, memory)
    squares = jnp.where(seen[..., 0], new, squares)
    out = jnp.einsum("bnhv,bnh->bnv", memory, q) / DIM**0.5
    return PrecondState(memory, squares), out

  names = "beta", "square_decay", "square_rate"
  gates = decay, *(given[name] for name in names)
  return cases.by_position(step, given, gates, mask, segment_ids)


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


@pytest.mark.parametrize("channels", [(), (DIM,)])
def test_all_gradients(channels):
  cases.assert_gradients(*SQUASHED, naive, given(150, channels))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*SQUASHED, naive, given(150))


def test_a_squash_of_1_is_the_gated_delta_rule():
  arrays = given(70)
  qkv = [arrays[name] for name in ("query", "key", "value")]
  gates = {name: arrays[name] for name in ("beta", "log_decay")}
  expected = delta_rule_attention(*qkv, **gates)
  del arrays["initial_state"]
  run = partial(precond_delta_attention, squash=1.0)
  found = run(**arrays)
  assert_close(found, expected, 1e-6)


def test_wrong_arguments_are_refused():
  arrays = given(9)
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]
  memory, squares = arrays["initial_state"]
  state = PrecondState(memory[..., 1:], squares)

  def call(**options):
    return precond_delta_attention(*qkv, **arrays | options)

  assert_refused(
    call,
    (
      ("initial_state: expected a PrecondState", {"initial_state": state}),
      ("is_causal: expected True, got False;", {"is_causal": False}),
      ("squash: expected 1 to 2, got 2.5", {"squash": 2.5}),
    ),
  )
  wrong = [("squash: expected 1 to 2", {"squash": 0.5})]
  assert_refused(ATTENTIONS["precond_delta"], wrong)
