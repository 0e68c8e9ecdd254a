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
    forget_bias: Σ log f over the positions after each one; None without forget gates.
    grows: a class attribute, not a field. If True, the first array of the cache has one
      row on axis 1 for each of max_length positions, and the cache is full when `index`
      reaches their number. If an int, each row serves that many positions.
    rows_per_head: a class attribute: the heads of the cache for each key/value head.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  index: Int[Array, "B"]
  forget_bias: Float[Array, "B S N"] | None = None
  grows = True
  rows_per_head = 1


def init_cache(
  batch: int,
  max_length: int,
  dims: Dims,
  dtype: Any,
  *,
  forgets: bool = False,
) -> DenseCache:
  """Creates an empty cache for `max_length` positions: B·S·K·(H+V) numbers."""
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
  """Writes the first `lengths` of P positions to the cache."""
  # Rows beyond an example's length are overwritten before any query sees them. Until
  # then they enter products with a weight of 0, so they must not be NaN.
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
  """Replaces rows beyond the length of each example with zeros."""
  keep = jnp.arange(x.shape[1])[None, :] < lengths[:, None]
  return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0)


def append(
  cache: DenseCache,
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
) -> DenseCache:
  """Appends one position to the cache; does not update `forget_bias`."""
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
  """Fills a ring buffer with the last W of `lengths` rows; row p is at p mod W."""
  index, last = jnp.arange(past.shape[1])[None], lengths[:, None] - 1
  # The latest position at each index of the buffer; negative if there is none.
  position = last - (last - index) % index.size
  position = jnp.clip(position, 0, rows.shape[1] - 1)
  return layout.rows_at(rows, position).astype(past.dtype)


class IndexedCache(NamedTuple):
  """The keys, values and index keys of the `index [B]` positions seen so far."""

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  index_key: Float[Array, "B S D"]
  index: Int[Array, "B"]
  grows = True


def init_indexed(
  batch: int, max_length: int, dims: Dims, dtype: Any, index_dim: int
) -> IndexedCache:
  """Creates an empty cache; its index keys of width D are float32."""
  dense = init_cache(batch, max_length, dims, dtype)
  index_key = jnp.zeros((batch, max_length, index_dim), jnp.float32)
  return IndexedCache(dense.key, dense.value, index_key, dense.index)


def append_indexed(
  cache: IndexedCache,
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  index_key: Float[Array, "B 1 D"],
) -> IndexedCache:
  """Appends one position to the cache."""
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
  """Writes P positions to the cache, of which the first `lengths` count."""
  return IndexedCache(
    layout.put(cache.key, key, 0),
    layout.put(cache.value, value, 0),
    layout.put(cache.index_key, index_key, 0),
    lengths,
  )
