"""Dropout on attention weights, drawn tile by tile."""

import jax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

_GOLDEN = np.uint32(0x9E3779B9)
"""φ·2³², whose multiples are as far from one another as can be."""


def kept(
  key: Array | None, rate: float, shape: tuple[int, ...], *numbers: Array | int
) -> Float[Array, "..."]:
  """Keep / (1 − rate) for the tile that `numbers` name.

  It follows from the key and the numbers alone, so the backward draws again
  what the forward drew, however many tiles are one step.
  """
  for number in numbers:
    key = jax.random.fold_in(_given(key), number)
  keep = 1.0 - rate
  return jax.random.bernoulli(_given(key), keep, shape) / keep


def of_pairs(
  key: Array | None,
  rate: float,
  batch: int,
  num_heads: int,
  queries: Int[Array, "C"],
  keys: Int[Array, "D"],
) -> Float[Array, "B N C D"]:
  """Keep / (1 − rate) for pairs of positions of queries and keys.

  It follows from the key, the example, the head and the two positions alone:
  mechanisms, sizes of tiles and devices that compute the same pairs drop the same
  ones. Each pair takes one word of Threefry. Its counter is the position of the
  key, and that of the query plus φ·2³² for each example and head before, which
  keeps their ranges apart (for 4,096 of them up to 744,000 positions; beyond,
  two heads would drop alike somewhere).
  """
  first_key, second_key = jax.random.bits(_given(key), (2,), "uint32")
  head_starts = jnp.arange(batch * num_heads, dtype=jnp.uint32) * _GOLDEN
  head_starts = head_starts.reshape(batch, num_heads, 1, 1)
  rows = head_starts + queries.astype(jnp.uint32)[None, None, :, None]
  counters = jnp.broadcast_arrays(
    rows, keys.astype(jnp.uint32)[None, None, None, :]
  )
  bits, _ = threefry2x32_p.bind(first_key, second_key, *counters)
  keep = 1.0 - rate
  is_kept = bits < jnp.uint32(min(round(keep * 2**32), 2**32 - 1))
  return jnp.where(is_kept, jnp.float32(1.0 / keep), 0.0)


def _given(key: Array | None) -> Array:
  if key is None:
    raise ValueError("key: expected one to draw dropout with, got None")
  return key
