"""Block selection of MoBA, of MiniMax-M3 and of native sparse attention.

A selection has no gradient. Of two blocks with equal scores, the earlier is selected.
Results are block numbers, padded with −1 where fewer blocks are selected.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import checks
from attention.platform import backend, layout
from attention.platform.blocks import chunk_map, pad, split_blocks
from attention.platform.layout import query_dot
from attention.softmax.rows import masked_softmax


def moba_blocks(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  keep: Bool[Array, "B S"],
  positions: Int[Array, "B T"],
  block_size: int,
  top_k: int,
) -> Int[Array, "B T N M"]:
  """Selects the blocks of MoBA: the query's own, and those with the best mean keys.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    keep: whether each key is unmasked.
    positions: positions of the queries in the sequence of keys.
    block_size: D.
    top_k: the number of blocks; M is the smaller of this and ⌈S/D⌉.
  """
  query, key = jax.lax.stop_gradient((query, key))
  key = layout.zero_masked(key, keep).astype(jnp.float32)
  sums = jnp.sum(split_blocks(key, block_size), axis=2)
  counts = jnp.sum(split_blocks(keep, block_size), axis=2)
  means = sums / jnp.maximum(counts, 1)[..., None, None]
  num_blocks = means.shape[1]
  numbers = jnp.arange(num_blocks)[None, None, None]

  def select(rows):
    query, positions = rows
    scores = _head_products(query, means)
    own = (positions // block_size)[:, :, None, None]
    is_candidate = (numbers < own) & (counts > 0)[:, None, None]
    return _top_blocks(scores, is_candidate, numbers == own, top_k)

  batch, length, num_heads, _ = query.shape
  row_bytes = 4 * batch * num_heads * num_blocks
  size = backend.rows_per_tile(row_bytes, length)
  return chunk_map(select, size, (query, positions))


def compact(
  keep: Bool[Array, "B T"], *arrays: Shaped[Array, "B T *F"]
) -> tuple[Array, ...]:
  """Moves unmasked positions to the front, in order, and fills the rest with zeros."""
  order = jnp.argsort(~keep, axis=1, stable=True)

  def reorder(x):
    ones = [1] * (x.ndim - 2)
    x = jnp.where(keep.reshape(*keep.shape, *ones), x, jnp.zeros_like(x))
    return jnp.take_along_axis(x, order.reshape(*order.shape, *ones), axis=1)

  return tuple(map(reorder, arrays))


def cumulative_counts(
  keep: Bool[Array, "B T"] | None, shape: tuple[int, ...]
) -> Int[Array, "B T"]:
  """The number of unmasked positions up to and including each one; `shape` is B, T."""
  if keep is None:
    return jnp.broadcast_to(jnp.arange(1, shape[1] + 1)[None], shape)
  return jnp.cumsum(keep, axis=1)


def indexer_blocks(
  query: Float[Array, "B T I D"],
  key: Float[Array, "B S D"],
  keep: Bool[Array, "B S"],
  positions: Int[Array, "B T"],
  block_size: int,
  top_k: int,
  local_blocks: int,
  num_heads: int,
) -> Int[Array, "B T G M"]:
  """Selects the blocks that contain the largest products of an index query and a key.

  Args:
    query: index queries; each of the I index heads selects for its group of heads.
    key: index keys, shared by all index heads.
    keep: whether each key is unmasked.
    positions: positions of the queries in the sequence of keys.
    block_size: the number of keys in a block.
    top_k: the number of blocks; M is the smaller of this and ⌈S / block_size⌉.
    local_blocks: the number of nearest blocks, including the query's own, that are
      always selected.
    num_heads: N. If I is 1, G is 1 as well; otherwise G is N.
  """
  groups = query.shape[2]
  if num_heads % groups:
    raise ValueError(
      f"index_query: expected a number of heads that divides num_heads {num_heads}, "
      f"got {groups}"
    )
  query, key = jax.lax.stop_gradient((query, key))
  key = jnp.where(keep[..., None], key, 0)
  key, keep = (pad(x, -x.shape[1] % block_size) for x in (key, keep))
  numbers = jnp.arange(key.shape[1] // block_size)[None, None, None]

  def select(rows):
    query, positions = rows
    visible = jnp.arange(key.shape[1])[None, None] <= positions[..., None]
    visible = (visible & keep[:, None])[:, :, None]
    scores = layout.dot("bcid,bsd->bcis", query, key)
    scores = jnp.where(visible, scores, -jnp.inf)
    best = jnp.max(scores.reshape(*scores.shape[:3], -1, block_size), axis=4)
    own = (positions // block_size)[:, :, None, None]
    is_local = (numbers <= own) & (numbers > own - local_blocks)
    return _top_blocks(best, best > -jnp.inf, is_local, top_k)

  row_bytes = 4 * len(query) * groups * key.shape[1]
  size = backend.rows_per_tile(row_bytes, query.shape[1])
  blocks = chunk_map(select, size, (query, positions))
  return blocks if groups == 1 else jnp.repeat(blocks, num_heads // groups, 2)


def nsa_blocks(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B M K H"],
  keep: Bool[Array, "B M"],
  positions: Int[Array, "B T"],
  sizes: tuple[int, int, int, int],
  total: int,
  scale: float | Float[Array, ""] | None,
) -> Int[Array, "B T K n"]:
  """Selects the blocks of native sparse attention for each key head.

  Args:
    query: `[B, T, N, H]`.
    key: compressed keys.
    keep: whether each compressed key has an unmasked key.
    positions: positions of the queries.
    sizes: C, d, `block_size`, `num_blocks`.
    total: the number of blocks of the sequence.
    scale: as in `nsa_attention`.
  """
  size, stride, block_size, num_blocks = sizes
  query, key = jax.lax.stop_gradient((query, key))
  count, kv_heads = key.shape[1:3]
  ends = jnp.arange(count) * stride + size - 1
  numbers = jnp.arange(total)[None, None, None]
  scale = checks.softmax_scale(scale, query.shape[3])

  def select(rows):
    query, positions = rows
    logits = scale * _head_products(query, key)
    visible = keep[:, None] & (ends[None, None] <= positions[..., None])
    weights = masked_softmax(logits, visible[:, :, None])
    shape = kv_heads, query.shape[2] // kv_heads, count
    weights = jnp.sum(weights.reshape(*query.shape[:2], *shape), axis=3)
    scores = _block_scores(weights, total, sizes)
    own = (positions // block_size)[:, :, None, None]
    is_fixed = (numbers == 0) | (numbers == own) | (numbers == own - 1)
    is_candidate = numbers <= own
    return _top_blocks(
      scores, is_candidate, is_fixed & is_candidate, num_blocks
    )

  batch, length, num_heads, _ = query.shape
  size = backend.rows_per_tile(4 * batch * num_heads * (count + total), length)
  return chunk_map(select, size, (query, positions))


def _head_products(query, key):
  """The products `[B, C, N, M]` of queries `[B, C, N, H]` and keys `[B, M, K, H]`."""
  keys = jnp.swapaxes(key, 1, 2)
  products = query_dot("bkqh,bkmh->bkqm", jnp.swapaxes(query, 1, 2), keys)
  return jnp.swapaxes(products, 1, 2)


def _block_scores(weights, total, sizes):
  """Block scores `[B, C, K, total]` from the weights `[B, C, K, M]` of compressed keys.

  Compressed key i covers the strides i to i + C/d − 1. Its weight is added to the score
  of a block once for each of these strides in the block.
  """
  size, stride, block_size, _ = sizes
  overlap, width = size // stride, block_size // stride
  padding = [(0, 0)] * 3 + [(overlap - 1, total * width - weights.shape[-1])]
  weights = jnp.pad(weights, padding)
  shifted = (weights[..., i : i + total * width] for i in range(overlap))
  stride_scores = functools.reduce(jnp.add, shifted)
  return jnp.sum(
    stride_scores.reshape(*weights.shape[:3], total, width), axis=-1
  )


def _top_blocks(scores, is_candidate, is_fixed, count):
  """`count` block numbers: the fixed blocks, then the candidates of largest score."""
  scores = jnp.where(is_candidate, scores, -jnp.inf)
  scores = jnp.where(is_fixed, jnp.inf, scores)
  count = min(count, scores.shape[-1])
  if backend.name() == "cpu":
    best, blocks = jax.lax.top_k(scores, count)
    return jnp.where(best > -jnp.inf, blocks, -1)
  numbers = jnp.arange(scores.shape[-1])[None, None, None]

  def pop_best(scores, _):
    best = jnp.max(scores, axis=-1, keepdims=True)
    block = jnp.argmax(scores, axis=-1, keepdims=True)
    rest = jnp.where(numbers == block, -jnp.inf, scores)
    return rest, jnp.where(best > -jnp.inf, block, -1)[..., 0]

  # On accelerators, `top_k` would sort all blocks of every row.
  _, blocks = jax.lax.scan(pop_best, scores, length=count, unroll=4)
  return jnp.moveaxis(blocks, 0, -1)
