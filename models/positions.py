"""Absolute position encodings; relative ones are in `attention.positions`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np


def sinusoidal(
  positions: Int[Array, "B T"], features: int
) -> Float[Array, "B T F"]:
  """Sines and cosines: PE(p, 2i) = sin(p·ω_i), PE(p, 2i+1) = cos(p·ω_i).

  ω_i = 10000^(-2i/F). Any position has a value, none is stored.

  Args:
    positions: `[B, T]`.
    features: F, even.

  Returns:
    `[B, T, F]` float32.

  Paper: Attention is all you need, section 3.5, arXiv:1706.03762.
  """
  # Frequencies are rounded from float64 once.
  frequencies = 10000.0 ** (-np.arange(0, features, 2) / features)
  angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(
    frequencies, jnp.float32
  ).reshape(1, 1, -1)
  pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  return pairs.reshape(*positions.shape, features)
