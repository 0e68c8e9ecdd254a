"""Momentum DeltaNet: values, states, gradients, and the rule without momentum."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  definitions,
  delta_rule_attention,
  momentum_delta,
  momentum_delta_attention,
)
from attention.mechanism import Dims
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, VALUE

BOTH = momentum_delta_attention, definitions.momentum_delta_attention
SCALED = [partial(function, scale=0.7) for function in BOTH]


def given(length):
  """Arrays with a first state; decays of momentum of 1 and e⁻⁵⁰ among them."""
  rng = np.random.default_rng(3)
  shape = BATCH, length, HEADS
  momentum_decay = -rng.exponential(0.4, size=shape)
  if length > 40:
    momentum_decay[:, 12:15], momentum_decay[:, 36] = 0.0, -50.0
  return cases.arrays(
    length,
    beta=rng.uniform(0.0, 0.6, size=shape),
    eta=rng.uniform(size=shape),
    momentum_decay=momentum_decay,
    initial_state=rng.normal(size=(BATCH, HEADS, 2 * DIM, VALUE)),
  )


def naive(given, mask, segment_ids):
  """Position by position, to be differentiated in float64."""

  def step(state, now):
    q, k, v, g, h, beta, eta, seen, first = now
    first, seen = (x[:, None, None, None] for x in (first, seen))
    state = jnp.where(first, 0.0, state)
    memory, momentum = state[:, :, :DIM], state[:, :, DIM:]
    decayed = jnp.exp(g)[..., None, None] * memory
    error = v - jnp.einsum("bnhv,bnh->bnv", decayed, k)
    written = (eta[..., None] * k)[..., None] * error[:, :, None]
    momentum = jnp.exp(h)[..., None, None] * momentum + written
    after = decayed + beta[..., None, None] * momentum
    after = jnp.concatenate([after, momentum], axis=2)
    state = jnp.where(seen, after, state)
    return state, 0.7 * jnp.einsum("bnhv,bnh->bnv", state[:, :, :DIM], q)

  names = "log_decay", "momentum_decay", "beta", "eta"
  gates = [given[name] for name in names]
  return cases.by_position(step, given, gates, mask, segment_ids)


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


def test_all_gradients():
  cases.assert_gradients(*SCALED, naive, given(150))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*SCALED, naive, given(150))


def test_extreme_decays_stay_finite():
  arrays = given(150)
  for low in (-1e4, 0.0):
    arrays["log_decay"][:] = arrays["momentum_decay"][:] = low
    arrays["beta"] *= 0.2  # Without decays, a state with more momentum grows.
    cases.assert_finite(*BOTH, arrays)


def test_without_momentum_it_is_the_gated_delta_rule():
  arrays = given(70)
  qkv = [arrays[name] for name in ("query", "key", "value")]
  expected = delta_rule_attention(
    *qkv,
    beta=arrays["beta"] * arrays["eta"],
    log_decay=arrays["log_decay"],
    initial_state=arrays["initial_state"][:, :, :DIM],
  )
  arrays["momentum_decay"][:] = -200.0
  assert_close(momentum_delta_attention(**arrays), expected, 2e-6)


def test_one_key_by_hand():
  """Twice the same key of one channel: S is 1.5 · 2 and then as computed here."""
  one = np.ones((1, 2, 1, 1), np.float32)
  rates = np.float32([[[0.5], [0.25]]])
  found, state = momentum_delta_attention(
    *(one, one, np.float32([[[[2.0]], [[3.0]]]])),
    beta=rates,
    eta=2.0 * rates,
    log_decay=np.log(np.float32([[[1.0], [0.5]]])),
    momentum_decay=np.log(np.float32([[[1.0], [0.75]]])),
    scale=1.0,
    return_state=True,
  )
  # M₁ = 1 · 2, S₁ = 0.5 · 2 = 1; S' = 0.5, error 2.5, M₂ = 0.75 · 2 + 0.5 · 2.5.
  np.testing.assert_allclose(found[0, :, 0, 0], [1.0, 0.5 + 0.25 * 2.75])
  np.testing.assert_allclose(state[0, 0, :, 0], [0.5 + 0.25 * 2.75, 2.75])


def test_gates_keep_the_sum_of_squares_of_the_angle():
  """cos²θ + sin²θ = 1: with a rate of 1 and no step, β and e^g are both."""
  mechanism, dims = momentum_delta(), Dims(2, 2, 4, 9, 6)
  params = mechanism.init(jax.random.key(0), dims)["params"]
  params |= {
    "rate_kernel": params["rate_kernel"] * 0.0,
    "log_rate": params["log_rate"] - 100.0,
    "momentum_step_bias": params["momentum_step_bias"] + 50.0,
  }
  inputs = np.random.default_rng(0).normal(size=(2, 9, 6)).astype(np.float32)
  gates = mechanism.gates({"params": params}, inputs)
  total = 2.0 * gates["beta"] + jnp.exp(gates["log_decay"])
  np.testing.assert_allclose(total, 1.0, rtol=1e-5)
  assert 0.0 < gates["beta"].min() < gates["beta"].max() < 0.5
  assert (gates["momentum_decay"] == -2.0).all()


def test_bfloat16():
  cases.assert_bfloat16(*BOTH, given(70))


def test_wrong_arguments_are_refused():
  arrays = given(9)
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]

  def call(**options):
    return momentum_delta_attention(*qkv, **arrays | options)

  assert_refused(
    call,
    (
      (
        r"initial_state: expected \[B, N, 2H, V\] = \(2, 4, 16, 5\)",
        {"initial_state": np.zeros((2, 4, 8, 5), "f")},
      ),
      ("is_causal: expected True, got False;", {"is_causal": False}),
      (r"eta: expected", {"eta": np.ones((2, 9, 3), "f")}),
    ),
  )
