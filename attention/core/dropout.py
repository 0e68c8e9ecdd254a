"""Dropout on attention weights, drawn tile by tile."""

import jax
from jaxtyping import Array, Float


def kept(
  key: Array | None, rate: float, shape: tuple[int, ...], *numbers: Array | int
) -> Float[Array, "..."]:
  """Keep / (1 − rate) for the tile that `numbers` name.

  It follows from the key and the numbers alone, so the backward draws again
  what the forward drew, however many tiles are one step.
  """
  if key is None:
    raise ValueError("key: expected one to draw dropout with, got None")
  for number in numbers:
    key = jax.random.fold_in(key, number)
  keep = 1.0 - rate
  return jax.random.bernoulli(key, keep, shape) / keep
