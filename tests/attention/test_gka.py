"""Gated KalmaNet: values, states, gradients, its solver, and its two extremes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  definitions,
  gated_linear_attention,
  gka_attention,
  mesa_attention,
)
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention import test_mesa
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS

# As many iterations as it takes to the exact solution.
BOTH = (partial(gka_attention, num_iterations=80), definitions.gka_attention)
OTHER = [partial(function, scale=0.7, ridge_ratio=0.05) for function in BOTH]


def given(length):
  """Arrays with a first state, that of 20 positions."""
  rng = np.random.default_rng(4)
  arrays = test_mesa.given(length)
  del arrays["regularizer"]
  arrays["beta"] += 0.05
  alpha = rng.uniform(size=(BATCH, length, HEADS))
  return arrays | {"alpha": np.float32(alpha)}


def naive(given, mask, segment_ids):
  """All systems at once, to be differentiated in float64."""
  decays, first = cases.decays(given["log_decay"], mask, segment_ids)
  key, value = (
    jnp.repeat(given[name], HEADS // KV_HEADS, axis=2)
    for name in ("key", "value")
  )
  written = given["beta"][..., None] * key
  value = jnp.concatenate([key, value], axis=3)
  state = jnp.einsum("bnts,bsni,bsnj->btnij", decays, written, value)
  first = jnp.moveaxis(first, 1, 2)[..., None, None]
  state += first * given["initial_state"][:, None]
  gram, memory = state[..., :DIM], state[..., DIM:]
  square = jnp.sum(jnp.square(gram), axis=(-2, -1), keepdims=True)
  has_keys = square > 0.0
  ridge = 0.05 * jnp.sqrt(jnp.where(has_keys, square, 1.0))
  ridge *= jnp.eye(DIM)[None, None, None]
  query = given["query"]
  x = jnp.linalg.solve(gram + ridge, query[..., None])[..., 0]
  alpha = jnp.where(mask[:, 0, 0, :, None], given["alpha"], 0.0)[..., None]
  mixed = alpha * x + (1.0 - alpha) * query
  return 0.7 * jnp.einsum("btni,btniv->btnv", mixed, memory), state[:, -1]


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length), tolerance=1e-5)


def test_all_gradients():
  cases.assert_gradients(*OTHER, naive, given(150))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*OTHER, naive, given(150))


def test_extreme_decays_stay_finite():
  arrays = given(150)
  for low in (-1e4, 0.0):
    arrays["log_decay"][:] = low
    # Its condition number is 51, with one key alone as its past.
    cases.assert_finite(*BOTH, arrays, tolerance=5e-5)


def test_an_empty_state_reads_0():
  """With finite gradients, ahead of the first key and of its segment."""
  arrays = given(9)
  del arrays["initial_state"]
  arrays["key"][:, :2] = 0.0
  found, pullback = jax.vjp(lambda x: gka_attention(**x), arrays)
  assert not np.any(found[:, :2])
  assert np.all(np.any(found[:, 2:], axis=-1))
  for x in jax.tree.leaves(pullback(jnp.ones_like(found))):
    assert np.isfinite(x).all()


def test_the_error_falls_as_chebyshevs_bound():
  """2 ((√c − 1)/(√c + 1))^I of the largest x; a few keys come near to it."""
  arrays = given(120)
  del arrays["initial_state"]
  arrays["key"] = arrays["key"][:, :1].repeat(120, axis=1)
  arrays["alpha"][:] = 1.0
  for ridge_ratio in (0.02, 0.2):
    expected = definitions.gka_attention(**arrays, ridge_ratio=ridge_ratio)
    root = np.sqrt(1.0 + 1.0 / ridge_ratio)
    for count in (2, 8, 16):
      found = gka_attention(
        **arrays, ridge_ratio=ridge_ratio, num_iterations=count
      )
      error = np.abs(found - expected).max() / np.abs(expected).max()
      bound = 2.0 * ((root - 1.0) / (root + 1.0)) ** (count + 1)
      assert 0.01 * bound < error < bound + 1e-6, (ridge_ratio, count)


def test_without_alpha_it_is_gated_linear_attention():
  arrays = given(70)
  names = "query", "key", "value", "beta", "log_decay"
  query, key, value, beta, decay = (arrays[name] for name in names)
  arrays |= {"alpha": np.zeros_like(beta), "initial_state": None}
  value = beta[..., None] * value.repeat(HEADS // KV_HEADS, axis=2)
  expected = gated_linear_attention(query, key, value, log_decay=decay)
  assert_close(gka_attention(**arrays), expected, 1e-6)


def test_with_alpha_it_is_mesa_of_its_lambda():
  """One key: ‖S_kk‖ is the sum of weights of its squares, by hand."""
  arrays = given(30)
  arrays["key"] = np.zeros_like(arrays["key"])
  arrays["key"][..., 1] = 0.5
  arrays["log_decay"][:], arrays["beta"][:] = 0.0, 0.8
  arrays |= {"alpha": np.ones_like(arrays["beta"]), "initial_state": None}
  found = BOTH[0](**arrays)[:, -1]
  del arrays["alpha"]
  ridge = np.full((HEADS, DIM), 0.02 * 30 * 0.8 * 0.5**2, np.float32)
  expected = mesa_attention(**arrays, regularizer=ridge, scale=DIM**-0.5)
  assert_close(found, expected[:, -1], 1e-5)


def test_bfloat16():
  cases.assert_bfloat16(*BOTH, given(70))


def test_what_does_not_fit_is_told():
  assert_refused(
    lambda **change: jax.eval_shape(
      lambda: cases.call(gka_attention, cases.as_jax({**given(9), **change}))
    ),
    (
      (
        r"initial_state: expected \[B, N, H, H\+V\] = \(2, 4, 8, 13\)",
        {"initial_state": np.zeros((2, 4, 8, 8), "f")},
      ),
      ("ridge_ratio: expected above 0, got 0.0", {"ridge_ratio": 0.0}),
      ("num_iterations: expected an int of at least 1", {"num_iterations": 0}),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
  for options in ({"num_iterations": 0}, {"ridge_ratio": -1.0}):
    (name,) = options
    assert_refused(ATTENTIONS["gka"], [(f"{name}: expected", options)])
