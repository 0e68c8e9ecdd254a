"""Which bucket a token falls in, and the sorted order of every round.

The hash of angular distance, in float32 whatever the tokens are in:

  h(x) = argmax [xR; -xR],   R ∈ ℝ^{H × buckets/2} standard normal,

the same R for all heads, another one each round. Two vectors at a small angle
mostly share a bucket; the length of a vector does not matter.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import lsh_rows
from attention.lsh_rows import Plan

_PRODUCTS = 2**18
"""How many products are held at a time, 1 MiB: they stay in cache."""


def buckets(
  x: Float[Array, "B T N H"], rotations: Float[Array, "rounds H half"]
) -> Int[Array, "rounds B N T"]:
  """The bucket of every token and head in every round, in blocks of tokens.

  Products are held as [rounds, buckets/2, rows]: XLA:CPU finds a largest one
  along a leading axis several times faster than along the last.
  """
  batch, length, num_heads, head_dim = x.shape
  num_rounds, _, half = rotations.shape
  out = jnp.zeros((num_rounds, batch, length, num_heads), jnp.int32)
  if half == 0:
    return jnp.swapaxes(out, 2, 3)
  size = _PRODUCTS // (num_rounds * half * batch * num_heads)
  size = min(max(size, 1), length)
  rows_of = jnp.swapaxes(rotations.astype(jnp.float32), 1, 2)
  rows_of = rows_of.reshape(num_rounds * half, head_dim)

  def step(i, out):
    start = jnp.minimum(i * size, length - size)
    rows = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
    # The same bucket on every device and in every call: full precision.
    products = jnp.einsum(
      "mh,nh->mn",
      rows_of,
      rows.astype(jnp.float32).reshape(-1, head_dim),
      precision=jax.lax.Precision.HIGHEST,
    )
    products = products.reshape(num_rounds, half, -1)
    distance = jnp.abs(products)
    largest = jnp.max(distance, axis=1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
    index = jnp.where(products < 0.0, half + index, index)
    # Among NaN none is the largest: any bucket will do.
    index = jnp.where(distance == largest, index, 2 * half - 1)
    block = jnp.min(index, axis=1).reshape(num_rounds, batch, size, num_heads)
    return jax.lax.dynamic_update_slice_in_dim(out, block, start, axis=2)

  out = jax.lax.fori_loop(0, -(-length // size), step, out)
  return jnp.swapaxes(out, 2, 3)


def plan(
  bucket: Int[Array, "rounds B N T"],
  keep: Bool[Array, "B T"] | None,
  *,
  segments: Int[Array, "B T"] | None = None,
  num_buckets: int,
  chunk_size: int,
  is_causal: bool,
) -> Plan:
  """Sorts every round; masked tokens go last. See `lsh_rows` for codes.

  With segments, the order is by segment, then by bucket, then by position, and
  a bucket of one segment is not that of another.
  """
  length = bucket.shape[-1]
  if keep is not None:
    bucket = jnp.where(keep[None, :, None, :], bucket, num_buckets)
  is_hidden = bucket == num_buckets
  order = _stable_argsort(bucket, num_buckets + 1)
  group = None
  if segments is not None:
    order, group = _sort_by_segment(order, bucket, keep, segments)
  positions = jnp.broadcast_to(jnp.arange(length), order.shape)
  place = jnp.put_along_axis(
    jnp.zeros_like(order), order, positions, axis=-1, inplace=False
  )
  if group is not None:
    num_buckets = length
    bucket = jnp.take_along_axis(group, place, axis=-1)
  if is_causal:
    width, code = chunk_size, place + chunk_size * bucket
  else:
    width, code = 2, place // chunk_size + 2 * bucket
  # Beyond all other codes, and no two within `width`.
  hidden = length + width * (num_buckets + 1 + place)
  code = jnp.where(is_hidden, hidden, code)
  heads = bucket.shape[1] * bucket.shape[2]
  group, steps = lsh_rows.groups(heads, length, chunk_size)
  padding = (chunk_size, group * steps * chunk_size - length)
  order = jnp.pad(order, ((0, 0), (0, 0), (0, 0), padding))
  return Plan(order, place + chunk_size, code)


def _sort_by_segment(
  order: Int[Array, "rounds B N T"],
  bucket: Int[Array, "rounds B N T"],
  keep: Bool[Array, "B T"] | None,
  segments: Int[Array, "B T"],
) -> tuple[Int[Array, "rounds B N T"], Int[Array, "rounds B N T"]]:
  """Sorts an order by bucket once more, by segment; masked tokens stay last.

  Returns:
    The order, and at each of its places the number of the (segment, bucket)
    that stands there, counted from 0.
  """
  length = segments.shape[-1]
  # Whatever the ids are, numbers up to T in the order of the ids.
  rank = jax.vmap(lambda ids: jnp.searchsorted(jnp.sort(ids), ids))(segments)
  if keep is not None:
    rank = jnp.where(keep, rank, length)
  rank = jnp.broadcast_to(rank[:, None, :], order.shape)
  again = _stable_argsort(jnp.take_along_axis(rank, order, axis=-1), length + 1)
  order = jnp.take_along_axis(order, again, axis=-1)

  def changes(x):
    x = jnp.take_along_axis(x, order, axis=-1)
    return jnp.diff(x, axis=-1, prepend=x[..., :1]) != 0

  new = changes(rank) | changes(bucket)
  return order, jnp.cumsum(new, axis=-1, dtype=order.dtype)


def _stable_argsort(
  x: Int[Array, "*A T"], num_values: int
) -> Int[Array, "*A T"]:
  """Where sorted integers in [0, num_values) come from, ties in order."""
  length = x.shape[-1]
  if num_values * length > jnp.iinfo(jnp.int32).max:
    return jnp.argsort(x, axis=-1)
  # One array of numbers sorts five times as fast as pairs.
  positions = jnp.broadcast_to(jnp.arange(length), x.shape)
  return jnp.sort(x * length + positions, axis=-1) % length
