"""Absolute position encodings; relative ones are in `attention.positions`."""

from collections.abc import Callable, Mapping
import types

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention.positions import rotary_frequencies, sines


def sinusoidal(
  positions: Int[Array | np.ndarray, "B T"], features: int
) -> Float[Array, "B T F"]:
  """Sines and cosines: PE(p, 2i) = sin(p·ω_i), PE(p, 2i+1) = cos(p·ω_i).

  ω_i = 10000^(-2i/F). Any position has an encoding; no table is stored.

  Args:
    positions: `[B, T]`.
    features: F, even.

  Returns:
    `[B, T, F]` float32.

  Paper: Attention is all you need, section 3.5, arXiv:1706.03762.
  """
  frequencies, _ = rotary_frequencies(features)
  sin, cos = sines(positions, frequencies)
  xp = np if isinstance(sin, np.ndarray) else jnp
  pairs = xp.stack([sin, cos], axis=-1)
  return jnp.asarray(pairs.reshape(*positions.shape, features))


ADDED: Mapping[str, Callable[..., Array]] = types.MappingProxyType(
  {"sinusoidal": sinusoidal}
)
"""`position` of a config -> `(positions [B, T], F) -> [B, T, F]`, added to embeddings."""
