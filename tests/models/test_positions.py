"""Absolute positions against the formula of their paper."""

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
