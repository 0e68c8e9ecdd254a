"""Position encodings against the formulas of their papers."""

import jax
import jax.numpy as jnp
import numpy as np

from models import positions


def test_sinusoidal_is_vaswani():
  length, features = 50, 12
  expected = np.zeros((length, features))
  for p in range(length):
    for i in range(features // 2):
      angle = p / 10000.0 ** (2 * i / features)
      expected[p, 2 * i] = np.sin(angle)
      expected[p, 2 * i + 1] = np.cos(angle)
  got = positions.sinusoidal(jnp.arange(length)[None], features)
  assert got.shape == (1, length, features)
  np.testing.assert_allclose(got[0], expected, atol=1e-5)


def test_rotary_is_su():
  """R_p x with block-diagonal R of 2×2 rotations, on the paper's pairs."""
  length, head_dim = 40, 8
  x = np.random.default_rng(0).normal(size=(2, length, 3, head_dim))
  # Feature i of ours is feature 2i of the paper's, and i + H/2 is 2i + 1.
  paper = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)
  expected = np.zeros_like(x)
  for p in range(length):
    rotation = np.zeros((head_dim, head_dim))
    for i in range(head_dim // 2):
      angle = p * 10000.0 ** (-2 * i / head_dim)
      c, s = np.cos(angle), np.sin(angle)
      rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    expected[:, p] = x[:, p] @ rotation.T
  ids = jnp.arange(length)[None]
  got = positions.rotate(jnp.asarray(x[..., paper], jnp.float32), ids)
  np.testing.assert_allclose(got, expected[..., paper], atol=1e-5)


def test_rotary_sees_distance_only():
  query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

  def product(t, s):
    turned_query = positions.rotate(query, jnp.array([[t]]))
    return jnp.sum(turned_query * positions.rotate(key, jnp.array([[s]])))

  np.testing.assert_allclose(product(7, 3), product(27, 23), atol=1e-5)
  assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_rotary_keeps_dtype_and_row_positions():
  x = jax.random.normal(jax.random.key(0), (2, 1, 1, 8), jnp.bfloat16)
  got = positions.rotate(x, jnp.array([[3], [5]]))
  assert got.dtype == jnp.bfloat16
  one = positions.rotate(x[1:], jnp.array([[5]]))
  np.testing.assert_array_equal(got[1:], one)
