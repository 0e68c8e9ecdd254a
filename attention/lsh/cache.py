"""The decode cache of `lsh_attention`: the past with its buckets and ranks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import arguments, layout, plug
from attention.lsh import hash as lsh_hash
from attention.softmax import masked_softmax


class LshCache(NamedTuple):
  """The tokens seen so far; S = max_length, rows from `index` on are unset.

  Attributes:
    vector: `[B, S, N, H]`, queries and keys.
    value: `[B, S, K, V]`.
    bucket: `[B, S, N, rounds]`.
    rank: `[B, S, N, rounds]`, how many earlier tokens share the bucket.
    index: `[B]`, the number of positions seen.
  """

  vector: Float[Array, "B S N H"]
  value: Float[Array, "B S K V"]
  bucket: Int[Array, "B S N rounds"]
  rank: Int[Array, "B S N rounds"]
  index: Int[Array, "B"]


def key_factors(
  vector: Float[Array, "B T N H"], scale: float | Float[Array, ""]
) -> Float[Array, "B T N"]:
  """The factor that makes x_i·x_j a logit: scale / |x_j|; 0 for x_j = 0."""
  squares = jnp.sum(jnp.square(vector.astype(jnp.float32)), axis=-1)
  # The inner `where` keeps the derivative of the root finite at 0.
  norm = jnp.sqrt(jnp.where(squares == 0.0, 1.0, squares))
  return jnp.where(squares == 0.0, 0.0, scale / norm)


def init_cache(
  num_rounds: int, batch: int, max_length: int, dims: plug.Dims, dtype: Any
) -> LshCache:
  """An empty cache of B·S·(N·H+K·V) numbers and 2·B·S·N·rounds integers."""
  heads, kv_heads, head_dim, *_ = dims
  buckets = jnp.zeros((batch, max_length, heads, num_rounds), jnp.int32)
  return LshCache(
    vector=jnp.zeros((batch, max_length, heads, head_dim), dtype),
    value=jnp.zeros((batch, max_length, kv_heads, dims.values), dtype),
    bucket=buckets,
    rank=buckets,
    index=jnp.zeros((batch,), jnp.int32),
  )


def prefill(
  rotations: Float[Array, "rounds H half"],
  cache: LshCache,
  query: Float[Array, "B P N H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
) -> LshCache:
  """The cache after the first `lengths` of P positions; sorts P buckets."""
  bucket = lsh_hash.buckets(query, rotations).transpose(1, 3, 2, 0)
  now = (query, value, bucket, _ranks(bucket))
  return LshCache(
    *(layout.put(past, x, 0) for past, x in zip(cache[:4], now, strict=True)),
    index=lengths,
  )


def _ranks(
  bucket: Int[Array, "B P N rounds"],
) -> Int[Array, "B P N rounds"]:
  """How many earlier tokens share the bucket of each."""
  order = jnp.argsort(bucket, axis=1, stable=True)
  in_order = jnp.take_along_axis(bucket, order, axis=1)
  place = jnp.arange(bucket.shape[1])[None, :, None, None]
  changes = in_order[:, 1:] != in_order[:, :-1]
  begins = jnp.pad(changes, ((0, 0), (1, 0), (0, 0), (0, 0)))
  first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
  back = jnp.argsort(order, axis=1)
  ranks = jnp.broadcast_to(place, bucket.shape) - first
  return jnp.take_along_axis(ranks, back, axis=1).astype(jnp.int32)


def decode(
  rotations: Float[Array, "rounds H half"],
  chunk_size: int,
  cache: LshCache,
  query: Float[Array, "B 1 N H"],
  value: Float[Array, "B 1 K V"],
  scale: float | Array | None = None,
) -> tuple[Float[Array, "B 1 N V"], LshCache]:
  """One position of the causal call; time S·N·(H+V+rounds) at any position.

  A past token is visible iff, in some round, it is in the same bucket and its
  rank there is less than `chunk_size` behind.
  """
  bucket = lsh_hash.buckets(query, rotations).transpose(1, 3, 2, 0)
  slots = jnp.arange(cache.vector.shape[1])[None, :, None, None]
  index = cache.index[:, None, None, None]
  same = (cache.bucket == bucket) & (slots < index)
  rank = jnp.sum(same, axis=1, keepdims=True, dtype=jnp.int32)
  seen = jnp.any(same & (rank - cache.rank < chunk_size), axis=-1)

  here = slots == index
  alone = ~jnp.any(seen, axis=1, keepdims=True)
  seen |= here[..., 0] & alone
  now = (query, value, bucket, rank)
  cache = LshCache(
    *(
      layout.written(past, x, here[..., 0, 0])
      for past, x in zip(cache[:4], now, strict=True)
    ),
    index=cache.index + 1,
  )
  factor = arguments.softmax_scale(scale, query.shape[-1])
  factors = key_factors(cache.vector, factor)
  logits = jnp.einsum(
    "BTNH,BSNH->BNTS",
    query,
    cache.vector,
    preferred_element_type=jnp.float32,
  )
  weights = masked_softmax(
    logits * jnp.moveaxis(factors, 1, 2)[:, :, None, :],
    jnp.moveaxis(seen, 1, 2)[:, :, None, :],
  )
  batch, num_heads, _, size = weights.shape
  kv_heads = value.shape[2]
  out = jnp.einsum(
    "BKJS,BSKV->BKJV",
    weights.astype(value.dtype).reshape(batch, kv_heads, -1, size),
    cache.value.astype(value.dtype),
    preferred_element_type=jnp.float32,
  )
  out = out.reshape(batch, 1, num_heads, -1).astype(query.dtype)
  return out, cache
