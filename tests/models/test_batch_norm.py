"""Batch norm by its formula, without padding, and its ε."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from models.batch_norm import BatchNorm


@functools.partial(jax.jit, static_argnums=3)
def norm(x, mask, variables, deterministic=True):
  return BatchNorm().apply(
    variables, x, mask, mutable=["batch_stats"], deterministic=deterministic
  )


def test_batch_norm_by_its_formula():
  rng = np.random.default_rng(0)
  x = 5 + rng.standard_normal((3, 7, 4)).astype(np.float32)
  mask = np.arange(7)[None] < np.array([[7], [3], [0]])
  x[~mask] = np.nan  # Padding may hold anything.
  scale, bias, mean, var = rng.uniform(0.5, 2, (4, 4)).astype(np.float32)
  variables = {
    "params": {"scale": scale, "bias": bias},
    "batch_stats": {"mean": mean, "var": var},
  }
  out, state = norm(x, mask, variables, False)
  heard = x[mask].astype(float)
  expected = (heard - heard.mean(0)) / np.sqrt(heard.var(0) + 1e-5)
  np.testing.assert_allclose(out[mask], expected * scale + bias, atol=1e-5)
  stats = state["batch_stats"]
  moved = 0.9 * mean + 0.1 * heard.mean(0), 0.9 * var + 0.1 * heard.var(0)
  np.testing.assert_allclose(stats["mean"], moved[0], rtol=1e-5)
  np.testing.assert_allclose(stats["var"], moved[1], rtol=1e-5)
  # Otherwise with the running ones, which stay.
  out, state = norm(x, mask, variables)
  expected = (heard - mean) / np.sqrt(var + 1e-5) * scale + bias
  np.testing.assert_allclose(out[mask], expected, atol=1e-5)
  np.testing.assert_array_equal(state["batch_stats"]["mean"], mean)


def test_batch_norm_of_nothing_moves_nothing():
  x, ones, zeros = np.ones((2, 3, 4), np.float32), np.ones(4), np.zeros(4)
  stats = {"mean": zeros + 0.5, "var": ones}
  variables = {"params": {"scale": ones, "bias": zeros}, "batch_stats": stats}
  out, state = norm(x, np.zeros((2, 3), bool), variables, False)
  assert np.isfinite(out).all()
  chex.assert_trees_all_equal(state["batch_stats"], stats)


def test_epsilon_of_a_batch_norm_is_inside_of_the_root():
  """0.01 / √(3e-5 + 1e-5), and ±0.01 / √(1e-4 + 1e-5) of a batch."""
  x = jnp.asarray([[[0.01], [-0.01]]])
  norm = BatchNorm()
  variables = norm.init(jax.random.key(0), x, deterministic=True)
  runs = {"mean": jnp.zeros(1), "var": jnp.full(1, 3e-5)}
  variables = {**variables, "batch_stats": runs}
  out = norm.apply(variables, x, deterministic=True)
  np.testing.assert_allclose(out[0, :, 0], [1.58113883, -1.58113883], rtol=1e-5)
  out = norm.apply(variables, x, deterministic=False)
  np.testing.assert_allclose(out[0, :, 0], [0.95346259, -0.95346259], rtol=1e-5)
