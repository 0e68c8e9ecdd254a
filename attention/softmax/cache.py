"""Caches of keys and values for decoding."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from attention.mechanism import Dims
from attention.platform import layout
from attention.softmax.forget_gates import prompt_forget_bias


class DenseCache(NamedTuple):
  """The keys and values of the positions seen so far.

  Attributes:
    key: `[B, S, K, H]`, S = max_length; rows from `index` on are unset.
    value: `[B, S, K, V]`.
    index: `[B]`, the number of positions seen.
    forget_bias: the cumulative log forget gate since each position, Σ log f over later
      positions; None without forget gates.
    grows: a class attribute, not a field. A cache with grows = True has max_length
      slots on axis 1 of its first array, and is full when `index` reaches that number.
      With another number, each of these slots is for that many positions.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  index: Int[Array, "B"]
  forget_bias: Float[Array, "B S N"] | None = None
  grows = True


def init_cache(
  batch: int,
  max_length: int,
  dims: Dims,
  dtype: Any,
  *,
  forgets: bool = False,
) -> DenseCache:
  """An empty cache for `max_length` positions: B·S·K·(H+V) numbers."""
  shape = (batch, max_length, dims.num_kv_heads)
  forget_bias = None
  if forgets:
    forget_bias = jnp.zeros((*shape[:2], dims.num_heads), jnp.float32)
  return DenseCache(
    key=jnp.zeros((*shape, dims.head_dim), dtype),
    value=jnp.zeros((*shape, dims.values), dtype),
    index=jnp.zeros((batch,), jnp.int32),
    forget_bias=forget_bias,
  )


def prefill(
  cache: DenseCache,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
  log_forget: Float[Array, "B P N"] | None = None,
) -> DenseCache:
  """The cache after the first `lengths` of P positions, which it copies."""
  # Rows beyond an example's length are overwritten before any query sees them. Until
  # then they enter products with a weight of 0, so they may not be NaN.
  key, value = (prompt_rows(x, lengths) for x in (key, value))
  forget_bias = cache.forget_bias
  if forget_bias is not None and log_forget is not None:
    forget_bias = layout.put(
      forget_bias, prompt_forget_bias(prompt_rows(log_forget, lengths)), 0
    )
  return DenseCache(
    layout.put(cache.key, key, 0),
    layout.put(cache.value, value, 0),
    lengths,
    forget_bias,
  )


def prompt_rows(
  x: Shaped[Array, "B P *F"], lengths: Int[Array, "B"]
) -> Shaped[Array, "B P *F"]:
  """`x` with zeros beyond the length of each example."""
  is_read = jnp.arange(x.shape[1])[None, :] < lengths[:, None]
  return jnp.where(is_read.reshape(*is_read.shape, *[1] * (x.ndim - 2)), x, 0)


def append(
  cache: DenseCache,
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
) -> DenseCache:
  """The cache with one more position; `forget_bias` is not updated."""
  here = jnp.arange(cache.key.shape[1])[None] == cache.index[:, None]
  return cache._replace(
    key=layout.write(cache.key, key, here),
    value=layout.write(cache.value, value, here),
    index=cache.index + 1,
  )


def ring(
  past: Shaped[Array, "B W *F"],
  rows: Shaped[Array, "B P *F"],
  lengths: Int[Array, "B"],
) -> Shaped[Array, "B W *F"]:
  """The last W of the first `lengths` rows, row p in slot p mod W of a cache `past`."""
  slots, last = jnp.arange(past.shape[1])[None], lengths[:, None] - 1
  # The latest position of each slot; below 0 if the slot is empty.
  position = last - (last - slots) % slots.size
  taken = jnp.clip(position, 0, rows.shape[1] - 1)
  return layout.rows_at(rows, taken).astype(past.dtype)


class IndexedCache(NamedTuple):
  """Keys, values and index keys of the positions seen so far, `index [B]` of them."""

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  index_key: Float[Array, "B S D"]
  index: Int[Array, "B"]
  grows = True


def init_indexed(
  batch: int, max_length: int, dims: Dims, dtype: Any, index_dim: int
) -> IndexedCache:
  """An empty cache, whose index keys of width D are float32."""
  exact = init_cache(batch, max_length, dims, dtype)
  index_key = jnp.zeros((batch, max_length, index_dim), jnp.float32)
  return IndexedCache(exact.key, exact.value, index_key, exact.index)


def append_indexed(
  cache: IndexedCache,
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  index_key: Float[Array, "B 1 D"],
) -> IndexedCache:
  """The cache with one more position."""
  here = jnp.arange(cache.key.shape[1])[None] == cache.index[:, None]
  return IndexedCache(
    layout.write(cache.key, key, here),
    layout.write(cache.value, value, here),
    layout.write(cache.index_key, index_key, here),
    cache.index + 1,
  )


def prefill_indexed(
  cache: IndexedCache,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  index_key: Float[Array, "B P D"],
  lengths: Int[Array, "B"],
) -> IndexedCache:
  """The cache after the first `lengths` of P positions."""
  return IndexedCache(
    layout.put(cache.key, key, 0),
    layout.put(cache.value, value, 0),
    layout.put(cache.index_key, index_key, 0),
    lengths,
  )
