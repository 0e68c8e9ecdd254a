"""Position encodings as functions of positions."""

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
  angles = _angles(positions, features)
  pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  return pairs.reshape(*positions.shape, features)


def rotate(
  inputs: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
  """Rotary positions: turns pair i of position p by the angle p·ω_i.

  ω_i = 10000^(-2i/H). The product of a query turned at t and a key turned at s
  depends on t - s only. The pairs are (x_i, x_{i+H/2}) where the paper has
  (x_{2i}, x_{2i+1}): the same up to a fixed permutation of features, which the
  projections before it absorb, and without a strided access.

  Args:
    inputs: queries or keys `[B, T, N, H]`, H even.
    positions: `[B, T]` or `[1, T]`.

  Returns:
    `[B, T, N, H]` in the dtype of `inputs`; the angles are float32.

  Paper: RoFormer, section 3.4.2, arXiv:2104.09864.
  """
  angles = _angles(positions, inputs.shape[-1])[:, :, None, :]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  left, right = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
  turned = [left * cos - right * sin, right * cos + left * sin]
  return jnp.concatenate(turned, axis=-1).astype(inputs.dtype)


def _angles(
  positions: Int[Array, "B T"], features: int
) -> Float[Array, "B T F/2"]:
  """p·ω_i; the frequencies are rounded from float64 once."""
  frequencies = 10000.0 ** (-np.arange(0, features, 2) / features)
  positions = positions[:, :, None].astype(jnp.float32)
  return positions * frequencies.astype(np.float32)[None, None, :]
