"""The bucket of every token, and the sorted order of every round.

The hash of angular distance, in float32 for tokens of any dtype, is

  h(x) = argmax [xR; -xR],   R ∈ ℝ^{H × buckets/2} standard normal,

with the same R for all heads and a different R in each round. Two vectors at a
small angle mostly share a bucket. The length of a vector does not matter.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import layout, platform
from attention.lsh.chunks import Chunks, Sorted, along


def buckets(
  x: Float[Array, "B T N H"], rotations: Float[Array, "rounds H half"]
) -> Int[Array, "rounds B N T"]:
  """The bucket of every token and head in every round, in blocks of tokens.

  The platform's budget says how many tokens are a block. Products have the axes
  [rounds, buckets/2, …], because XLA:CPU finds the largest faster along a
  leading axis than along the last.
  """
  batch, length, num_heads, head_dim = x.shape
  num_rounds, _, half = rotations.shape
  out = jnp.zeros((num_rounds, batch, length, num_heads), jnp.int32)
  if half == 0:
    return jnp.swapaxes(out, 2, 3)
  token_bytes = 4 * num_rounds * half * batch * num_heads
  least = max(platform.CACHE_BYTES // token_bytes, 1)
  size = platform.rows_at_once(token_bytes, length, least)
  columns = jnp.swapaxes(rotations.astype(jnp.float32), 1, 2)
  columns = columns.reshape(num_rounds * half, head_dim)

  def step(i, out):
    start = jnp.minimum(i * size, length - size)
    # Full precision gives the same bucket on every device and in every call.
    products = jnp.einsum(
      "mh,bcnh->mbcn",
      columns,
      layout.cut(x, start, size).astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    products = products.reshape(num_rounds, half, *products.shape[1:])
    distance = jnp.abs(products)
    largest = jnp.max(distance, axis=1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
    index = jnp.where(products < 0.0, half + index, index)
    # None of several NaN is the largest; such a token may get any bucket.
    index = jnp.where(distance == largest, index, 2 * half - 1)
    return layout.put(out, jnp.min(index, axis=1), start, axis=2)

  out = jax.lax.fori_loop(0, -(-length // size), step, out)
  return jnp.swapaxes(out, 2, 3)


def plan(
  chunks: Chunks,
  bucket: Int[Array, "rounds B N T"],
  keep: Bool[Array, "B T"] | None,
  *,
  segments: Int[Array, "B T"] | None = None,
  num_buckets: int,
) -> Sorted:
  """Sorts the tokens of every round, masked tokens last. Codes: see `chunks`.

  With segments, the order is by segment, then by bucket, then by position, and
  buckets of different segments are different.
  """
  size, length = chunks.size, chunks.length
  if keep is not None:
    bucket = jnp.where(keep[None, :, None, :], bucket, num_buckets)
  is_hidden = bucket == num_buckets
  order = _stable_argsort(bucket, num_buckets + 1)
  group = None
  if segments is not None:
    order, group = _sort_by_segment(order, bucket, keep, segments)
  place = _inverse(order)
  if group is not None:
    num_buckets = length
    bucket = along(group, place)
  nearest = place if chunks.is_causal else place // size
  code = nearest + chunks.width * bucket
  # Larger than all other codes, and at least `width` apart.
  hidden = length + chunks.width * (num_buckets + 1 + place)
  code = jnp.where(is_hidden, hidden, code)
  padding = (size, chunks.places - length)
  order = jnp.pad(order, ((0, 0), (0, 0), (0, 0), padding))
  return Sorted(order, place + size, code)


def _sort_by_segment(
  order: Int[Array, "rounds B N T"],
  bucket: Int[Array, "rounds B N T"],
  keep: Bool[Array, "B T"] | None,
  segments: Int[Array, "B T"],
) -> tuple[Int[Array, "rounds B N T"], Int[Array, "rounds B N T"]]:
  """Sorts an order by bucket again, by segment; masked tokens stay last.

  Returns:
    The order, and at each of its places the number of its (segment, bucket),
    counted from 0.
  """
  length = segments.shape[-1]
  # Ids may be any integers, but their ranks are below T.
  rank = jax.vmap(lambda ids: jnp.searchsorted(jnp.sort(ids), ids))(segments)
  if keep is not None:
    rank = jnp.where(keep, rank, length)
  rank = jnp.broadcast_to(rank[:, None, :], order.shape)
  order = along(order, _stable_argsort(along(rank, order), length + 1))

  def changes(x):
    x = along(x, order)
    return jnp.diff(x, axis=-1, prepend=x[..., :1]) != 0

  new = changes(rank) | changes(bucket)
  return order, jnp.cumsum(new, axis=-1, dtype=order.dtype)


def _stable_argsort(
  x: Int[Array, "*A T"], num_values: int
) -> Int[Array, "*A T"]:
  """A stable argsort of integers in [0, num_values)."""
  length = x.shape[-1]
  if num_values * length > jnp.iinfo(jnp.int32).max:
    return jnp.argsort(x, axis=-1)
  # Sorting one array of numbers is faster than sorting pairs.
  positions = jnp.broadcast_to(jnp.arange(length), x.shape)
  return jnp.sort(x * length + positions, axis=-1) % length


def _inverse(order: Int[Array, "rounds B N T"]) -> Int[Array, "rounds B N T"]:
  """The place of every token in an order."""
  places = jnp.arange(order.shape[-1], dtype=order.dtype)

  def of_head(order):
    return (
      jnp.zeros_like(order)
      .at[order]
      .set(places, mode="promise_in_bounds", unique_indices=True)
    )

  return jax.vmap(jax.vmap(jax.vmap(of_head)))(order)
