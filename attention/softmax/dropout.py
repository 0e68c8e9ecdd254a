"""Dropout on attention weights, drawn tile by tile."""

from typing import TypeGuard

import jax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

SHARED = (1, 1)
"""The shape of keys that drop the same pairs in all B examples and N heads."""

_GOLDEN = np.uint32(0x9E3779B9)
"""φ·2³² with the golden ratio φ, whose multiples are spread as evenly as possible."""


def shared(key: Array | None) -> Array:
  """Converts a typed or a raw random key to shared keys `[1, 1]`."""
  key = _require_key(key)
  if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)
  return key.reshape(SHARED)


def is_shared(key: Array | None) -> TypeGuard[Array]:
  """Whether all examples and heads drop the same pairs."""
  return key is not None and key.shape == SHARED


def split(
  key: Array | None, shape: int | tuple[int, ...], *, heads_differ: bool = False
) -> Array:
  """`jax.random.split`, which returns shared keys if `key` is shared.

  With `heads_differ`, one key is for some of the heads; shared keys are then repeated,
  so that all heads drop the same pairs.
  """
  key = _require_key(key)
  if not is_shared(key):
    return jax.random.split(key, shape)
  shape = (shape,) if isinstance(shape, int) else shape
  if heads_differ:
    return jnp.broadcast_to(key, (*shape, *SHARED))
  return jax.random.split(key[0, 0], shape).reshape(*shape, *SHARED)


def factors(
  key: Array | None, rate: float, shape: tuple[int, ...], *numbers: Array | int
) -> Float[Array, "..."]:
  """Draws dropout factors, 0 or 1 / (1 − rate), for the tile identified by `numbers`.

  They depend only on the key and the numbers, so the backward pass draws the same
  factors as the forward pass, however many tiles one step has. With shared keys,
  `shape` has one example and one head.

  Raises:
    ValueError: keys are shared, and `shape` has several examples or heads.
  """
  if is_shared(key):
    if shape[:2] != SHARED:
      raise ValueError(
        "dropout_rng: expected one key, as each head has its own pairs, got "
        "keys [1, 1]; give Flax's module broadcast_dropout=False"
      )
    key = key[0, 0]
  for number in numbers:
    key = jax.random.fold_in(_require_key(key), number)
  keep = 1.0 - rate
  return jax.random.bernoulli(_require_key(key), keep, shape) / keep


def pair_factors(
  key: Array | None,
  rate: float,
  batch: int,
  num_heads: int,
  queries: Int[Array, "C"],
  keys: Int[Array, "D"],
) -> Float[Array, "B N C D"]:
  """Draws dropout factors, 0 or 1 / (1 − rate), for pairs of query and key positions.

  A factor depends only on the key, the example, the head and the two positions, and not
  on the mechanism, the tile size or the device that computes the pair. Each pair takes
  one word of Threefry. Its counter is the position of the key, and the position of the
  query plus φ·2³² for each earlier example and head, so that the ranges of heads do not
  overlap (for 4,096 of them, up to 744,000 positions; beyond that, two heads would drop
  some of the same pairs).
  """
  if is_shared(key):
    shared_factors = pair_factors(key[0, 0], rate, 1, 1, queries, keys)
    return jnp.broadcast_to(
      shared_factors, (batch, num_heads, *shared_factors.shape[2:])
    )
  first_key, second_key = jax.random.bits(_require_key(key), (2,), "uint32")
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


def _require_key(key: Array | None) -> Array:
  if key is None:
    raise ValueError("key: expected a random key for dropout, got None")
  return key
