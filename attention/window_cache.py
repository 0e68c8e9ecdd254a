"""The decode cache of `sliding_window_attention`: a ring of the last keys."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import layout, plug
from attention.dense import attend_to_slots, forgotten_after, forgotten_since
from attention.dense import init_cache as init_dense


class SlidingWindowCache(NamedTuple):
  """The last R keys and values; position p is in slot p mod R.

  Attributes:
    key: `[B, R, K, H]`.
    value: `[B, R, K, H]`.
    index: `[B]`, the number of positions seen.
    forgotten: Σ log f after each position, where a mechanism forgets.
  """

  key: Float[Array, "B R K H"]
  value: Float[Array, "B R K H"]
  index: Int[Array, "B"]
  forgotten: Float[Array, "B R N"] | None = None


def init_cache(
  reach: int,
  batch: int,
  max_length: int,
  dims: plug.Dims,
  dtype: Any,
  *,
  forgets: bool = False,
) -> SlidingWindowCache:
  """An empty ring of R = min(reach + 1, max_length) keys.

  `reach` is left · the largest dilation, how far back a query sees.
  """
  size = min(reach + 1, max_length)
  empty = init_dense(batch, size, dims, dtype, forgets=forgets)
  return SlidingWindowCache(*empty)


def write(
  cache: SlidingWindowCache,
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  log_forget: Float[Array, "B 1 N"] | None = None,
) -> tuple[SlidingWindowCache, Int[Array, "B R"]]:
  """The ring with one more position, and the age of each slot in it.

  A slot of age 0 holds the new position, and one of age a that a positions
  before. Ages above the position, counted from 0, are of empty slots.
  """
  slots = jnp.arange(cache.key.shape[1])
  age = (cache.index[:, None] - slots[None, :]) % slots.size
  keys = layout.written(cache.key, key, age == 0)
  values = layout.written(cache.value, value, age == 0)
  forgotten = forgotten_after(cache.forgotten, log_forget, age == 0)
  return SlidingWindowCache(keys, values, cache.index + 1, forgotten), age


def prefill(
  cache: SlidingWindowCache,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
  log_forget: Float[Array, "B P N"] | None = None,
) -> SlidingWindowCache:
  """The ring after the first `lengths` of P positions; a copy of the last R."""
  slots = jnp.arange(cache.key.shape[1])[None, :]
  last = lengths[:, None] - 1
  # The latest position that is in each slot; below 0 where there is none yet.
  position = last - (last - slots) % slots.size
  taken = jnp.clip(position, 0, key.shape[1] - 1)
  keys, values = (
    layout.rows_at(x, taken).astype(cache.key.dtype) for x in (key, value)
  )
  forgotten = cache.forgotten
  if log_forget is not None:
    forgotten = layout.rows_at(forgotten_since(log_forget, lengths), taken)
  return SlidingWindowCache(keys, values, lengths, forgotten)


def decode(
  left: int,
  dilations: tuple[int, ...],
  cache: SlidingWindowCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  log_forget: Float[Array, "B 1 N"] | None = None,
  **options: Any,
) -> tuple[Float[Array, "B 1 N V"], SlidingWindowCache]:
  """One position of the causal call; time R·N·H at every position.

  Args:
    left: keys of the window before the query.
    dilations: one for all heads, or one per query head.
    cache: the keys and values before this position.
    query: the query of this position.
    key: the key of this position, which its query sees too.
    value: the value of this position.
    log_forget: of this position.
    **options: those of `attention.dense.decode`.

  Returns:
    The result `[B, 1, N, H]` and the cache with this position in it.
  """
  after, age = write(cache, key, value, log_forget)
  is_set = (age <= cache.index[:, None])[:, None, :]
  steps, rest = jnp.divmod(
    age[:, None, :], jnp.asarray(dilations, jnp.int32)[None, :, None]
  )
  seen = is_set & (rest == 0) & (steps <= left)
  out = attend_to_slots(
    query,
    after.key,
    after.value,
    seen=seen,
    distance=-steps,
    positions=(cache.index, cache.index[:, None] - age),
    forgotten=after.forgotten,
    **options,
  )
  return out, after
