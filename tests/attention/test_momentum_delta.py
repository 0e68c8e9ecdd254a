"""Momentum DeltaNet by hand, its gates, and the rule without momentum."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import (
  delta_rule_attention,
  momentum_delta,
  momentum_delta_attention,
)
from attention.mechanism import Dims
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.state_cases import DIM


def test_without_momentum_it_is_the_gated_delta_rule():
  arrays = cases.momentum_delta_arrays(70)
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
