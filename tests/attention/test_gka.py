"""Gated KalmaNet: its solver and its two extremes."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import (
  definitions,
  gated_linear_attention,
  gka_attention,
  mesa_attention,
)
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.state_cases import DIM, HEADS, KV_HEADS


def test_an_empty_state_reads_0():
  """With finite gradients, ahead of the first key and of its segment."""
  arrays = cases.gka_arrays(9)
  del arrays["initial_state"]
  arrays["key"][:, :2] = 0.0
  found, pullback = jax.vjp(lambda x: gka_attention(**x), arrays)
  assert not np.any(found[:, :2])
  assert np.all(np.any(found[:, 2:], axis=-1))
  for x in jax.tree.leaves(pullback(jnp.ones_like(found))):
    assert np.isfinite(x).all()


def test_the_error_falls_as_chebyshevs_bound():
  """2 ((√c − 1)/(√c + 1))^I of the largest x; a few keys come near to it."""
  arrays = cases.gka_arrays(120)
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
      assert 0.01 * bound < error < 1.01 * bound + 1e-6, (ridge_ratio, count)


def test_without_alpha_it_is_gated_linear_attention():
  arrays = cases.gka_arrays(70)
  names = "query", "key", "value", "beta", "log_decay"
  query, key, value, beta, decay = (arrays[name] for name in names)
  arrays |= {"alpha": np.zeros_like(beta), "initial_state": None}
  value = beta[..., None] * value.repeat(HEADS // KV_HEADS, axis=2)
  expected = gated_linear_attention(query, key, value, log_decay=decay)
  assert_close(gka_attention(**arrays), expected, 1e-6)


def test_with_alpha_it_is_mesa_of_its_lambda():
  """One key: ‖S_kk‖ is the sum of weights of its squares, by hand."""
  arrays = cases.gka_arrays(30)
  arrays["key"] = np.zeros_like(arrays["key"])
  arrays["key"][..., 1] = 0.5
  arrays["log_decay"][:], arrays["beta"][:] = 0.0, 0.8
  arrays |= {"alpha": np.ones_like(arrays["beta"]), "initial_state": None}
  # As many iterations as it takes to the exact solution.
  found = gka_attention(**arrays, num_iterations=80)[:, -1]
  del arrays["alpha"]
  ridge = np.full((HEADS, DIM), 0.02 * 30 * 0.8 * 0.5**2, np.float32)
  expected = mesa_attention(**arrays, regularizer=ridge, scale=DIM**-0.5)
  assert_close(found, expected[:, -1], 1e-5)
