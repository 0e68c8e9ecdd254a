"""Dropout on attention weights, drawn tile by tile."""

import jax
from jaxtyping import Array, Float


def kept(
  key: Array, rate: float, shape: tuple[int, ...], *numbers: Array | int
) -> Float[Array, "..."]:
  """keep / (1 − rate) for the tile that `numbers` name.

  It follows from the key and the numbers alone, so the backward draws again
  what the forward drew, however many tiles are one step.
  """
  for number in numbers:
    key = jax.random.fold_in(key, number)
  keep = 1.0 - rate
  return jax.random.bernoulli(key, keep, shape) / keep
