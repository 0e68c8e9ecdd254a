"""Dropout on attention weights, drawn tile by tile."""

import jax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
  """Keep / (1 − rate) for pairs of positions.

  It follows from the key, the example, the head and the two positions alone:
  mechanisms, sizes of tiles and devices that compute the same pairs drop the same
  ones. Each pair takes one word of Threefry, with its positions as the counter,
  under a key that Threefry makes of the example and the head.

  Args:
    key: of any kind.
    rate: share of weights that are set to zero.
    batch: B.
    num_heads: N.
    queries: their positions.
    keys: their positions.
  """
  words = jax.random.bits(_given(key), (2,), "uint32")
  of_head = _threefry(
    (words[0], words[1]),
    jnp.arange(batch)[:, None, None, None],
    jnp.arange(num_heads)[None, :, None, None],
  )
  bits, _ = _threefry(
    of_head, queries[None, None, :, None], keys[None, None, None, :]
  )
  keep = 1.0 - rate
  is_kept = bits < jnp.uint32(min(round(keep * 2**32), 2**32 - 1))
  return jnp.where(is_kept, jnp.float32(1.0 / keep), 0.0)


def _given(key: Array | None) -> Array:
  if key is None:
    raise ValueError("key: expected one to draw dropout with, got None")
  return key


def _threefry(
  key: tuple[Array, Array], first: Array, second: Array
) -> tuple[Array, Array]:
  """Two words for each pair of counters."""
  counters = (jnp.asarray(x).astype(jnp.uint32) for x in (first, second))
  first_word, second_word = threefry2x32_p.bind(
    *jnp.broadcast_arrays(*key, *counters)
  )
  return first_word, second_word
