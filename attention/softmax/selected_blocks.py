"""Attention of each query to selected blocks of keys.

The caller selects the blocks. Native sparse attention, mixture of block attention and
DeepSeek sparse attention differ only in how they do so.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_function
from attention.platform import backend, layout
from attention.platform.blocks import block_map, chunk_map, split_blocks
from attention.platform.derivative import with_backward
from attention.softmax.rows import Output, block_attention, softmax_and_lse

_TILE_ROWS = 64
"""C, the number of queries in a tile."""

_KEYS_PER_HEAD = 8
"""The largest number of keys in a block, per query head of a key head, for which keys
are gathered; larger blocks are computed in tiles."""


class _Rows(NamedTuple):
  """R queries `[R, J, H]` of one key head, and their blocks, positions and segments."""

  query: Any
  blocks: Any
  position: Any
  ids: Any


class _Keys(NamedTuple):
  """Blocks `[G, D]` of keys and values of a key head, of masks and of segments."""

  key: Any
  value: Any
  keep: Any
  ids: Any

  def visible(self, block, position, ids, is_causal):
    """Visible keys `[*A, D]` of blocks `[*A]`, for queries at positions `[*A, 1]`."""
    visible, positions = self.keep[block], jnp.arange(self.keep.size)
    if is_causal:
      visible &= positions.reshape(self.keep.shape)[block] <= position
    return visible if self.ids is None else visible & (self.ids[block] == ids)


@attention_function
def selected_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  block_indices: Int[Array, "B T G M"],
  block_size: int,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  query_positions: Int[Array, "B T"] | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to M given blocks of keys.

    out = selected_attention(q, k, v, block_indices=indices, block_size=64)

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = {s : s // D ∈ block_indices[t], s ≤ t}

  for each head, with D = `block_size`. A block that is listed twice counts once. D = 1
  selects single keys.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    block_indices: block numbers, in any order: one selection per key head (G = K), for all
      heads (G = 1), or per query head (G = N). Invalid numbers, such as -1, are
      ignored.
    block_size: D. The last block may be shorter.
    mask: key mask, `[B, 1, 1, S]`.
    is_causal: query t sees only keys s ≤ t, even in its own block.
    query_positions: positions of the queries among the keys; None means 0, 1, ….
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `flash_attention`. Gradients flow to queries, keys, values and the scale,
    but not through the selection.

  Raises:
    ValueError: the mask varies along queries.

  Cost: time T·M·D·N·(H+V), and T·M·log(T·M) to sort; memory, in addition to copies of
  the arrays, about 6·S·N·(H+V) with `block_size=64`, twice that with gradients, or
  S·K·(H+V) where keys are gathered.

  Keys are gathered for each query if D ≤ 8·N/K, or D ≤ 8 with G = N. Larger blocks are
  computed in tiles: pairs of query and block are sorted by block, one product computes
  up to `_TILE_ROWS` queries of a block, and the results of a query are merged by their
  log-sum-exps.

  Papers: NSA, arXiv:2502.11089, section 3.3; MoBA, arXiv:2502.13189.
  """
  batch, length, num_heads, head_dim = query.shape
  kv_heads, groups = key.shape[2], block_indices.shape[2]
  if groups not in (1, kv_heads, num_heads) or not block_indices.shape[3]:
    raise ValueError(
      f"block_indices: expected [B, T, G, M] with G = 1 for all heads, {kv_heads} for "
      f"key heads or {num_heads} for query heads, and M of at least 1, got shape "
      f"{block_indices.shape}"
    )
  keep = checks.key_mask(mask, query, key, "name keys in block_indices")
  if keep is None:
    keep = jnp.ones(key.shape[:2], jnp.bool_)
  else:
    key, value = (layout.zero_masked(x, keep) for x in (key, value))
  source = key, value, keep, key_segment_ids
  keys = _Keys(*split_blocks(source, block_size))
  count, num_blocks = keys.keep.shape[1], block_indices.shape[3]

  # Query heads with their own selections become separate rows.
  repeats = num_heads // kv_heads if groups > kv_heads else 1
  heads = kv_heads, repeats, num_heads // kv_heads // repeats
  num_rows = length * repeats
  blocks = _ascending(block_indices, count)
  blocks = blocks.reshape(batch, length, -1, repeats, num_blocks)
  blocks = jnp.broadcast_to(blocks, (batch, length, *heads[:2], num_blocks))

  def split_rows(x):
    x = jnp.swapaxes(x, 2, 3)
    return x.reshape(batch, num_rows, kv_heads, *x.shape[4:])

  positions = query_positions
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
  positions, ids = jax.tree.map(
    lambda x: jnp.repeat(x, repeats, axis=1), (positions, query_segment_ids)
  )
  grouped = query.reshape(batch, length, *heads, head_dim)
  rows = _Rows(split_rows(grouped), split_rows(blocks), positions, ids)
  scale = checks.softmax_scale(scale, head_dim)
  options = {"is_causal": is_causal, "scale": scale}
  if block_size > _KEYS_PER_HEAD * heads[2]:
    tile_bytes = 4 * batch * _TILE_ROWS * block_size * num_heads // repeats
    tiles_per_step = backend.tiles_per_step(tile_bytes, count)
    attend = functools.partial(
      _attend_in_tiles, tiles_per_step=tiles_per_step, **options
    )
    # As many rows as the budget allows, but enough for two full tiles of each block.
    row_bytes = query.nbytes // num_rows * 2 * num_blocks
    max_rows = backend.tiles_per_step(row_bytes, num_rows)
    max_rows = max(max_rows, 2 * count * _TILE_ROWS // num_blocks)
  else:
    attend = functools.partial(_attend_by_row, **options)
    row_keys = num_blocks * block_size
    row_bytes = 4 * batch * kv_heads * row_keys * (head_dim + value.shape[3])
    # The backward pass of a chunk adds to the gradients of all keys, so a chunk gathers
    # at least as many keys as there are.
    max_rows = backend.tiles_per_step(row_bytes, num_rows)
    max_rows = max(max_rows, key.shape[1] // row_keys)
  chunk = -(-num_rows // -(-num_rows // max(max_rows, 1)))
  axes = _Rows(1, 1, None, None), _Keys(2, 2, None, None)
  attend = jax.vmap(jax.vmap(attend, axes, 1))
  results = chunk_map(lambda rows: attend(rows, keys), chunk, rows)

  def join_rows(x):
    x = x.reshape(batch, length, repeats, kv_heads, *x.shape[3:])
    return jnp.swapaxes(x, 2, 3).reshape(*query.shape[:3], *x.shape[5:])

  out, lse = jax.tree.map(join_rows, results)
  return (out, lse) if return_lse else out


def _ascending(
  blocks: Int[Array, "B T G M"], count: int
) -> Int[Array, "B T G M"]:
  """Sorts block numbers; `count` replaces invalid and repeated ones."""
  is_block = (blocks >= 0) & (blocks < count)
  blocks = jnp.sort(jnp.where(is_block, blocks, count).astype(jnp.int32))
  is_new = jnp.diff(blocks, axis=-1, prepend=-1) > 0
  return jnp.where(is_new, blocks, count)


def _attend_by_row(rows, keys, *, is_causal, scale):
  """Computes attention with the keys gathered for each row."""

  def attend(row):
    block = jnp.minimum(row.blocks, len(keys.key) - 1)
    visible = keys.visible(block, row.position, row.ids, is_causal)
    visible &= (row.blocks < len(keys.key))[:, None]
    out, lse = block_attention(
      row.query[None],
      keys.key[block].reshape(1, visible.size, -1),
      keys.value[block].reshape(1, visible.size, -1),
      scale=scale,
      visible=visible.reshape(1, 1, 1, -1),
    )
    return out[0], lse[0]

  return jax.vmap(attend)(rows)


def _attend_in_tiles(rows, keys, *, tiles_per_step, is_causal, scale):
  """Computes attention in tiles of rows that selected the same block."""
  tiles = _make_tiles(rows.blocks, len(keys.key))

  def attend(query, key, value, block, position, ids, is_pair):
    block, position = block[:, None], position[..., None]
    ids = ids if ids is None else ids[..., None]
    visible = keys.visible(block, position, ids, is_causal)
    visible &= is_pair[..., None]
    key, value, visible = key[:, None], value[:, None], visible[:, None, None]
    return block_attention(query, key, value, scale=scale, visible=visible)

  query = _tile_rows((rows.query, tiles))
  position, ids = jax.tree.map(
    lambda x: _gather(x, tiles.row), (rows.position, rows.ids)
  )
  key, value = _tile_keys((keys.key, keys.value, tiles))
  arrays = query, key, value, tiles.block, position, ids, tiles.is_pair
  results = block_map(
    attend, tiles_per_step, *jax.tree.map(lambda x: x[None], arrays)
  )
  out, lse = _pair_results((*(x[0] for x in results), tiles))
  lse = jnp.swapaxes(lse, 1, 2)
  is_valid = tiles.is_valid[:, None] & (lse > -jnp.inf)
  shares, lse = softmax_and_lse(lse, is_valid)
  out = layout.dot("rjm,rmjv->rjv", shares.astype(out.dtype), out)
  return out.astype(rows.query.dtype), lse


class _Tiles(NamedTuple):
  """Tiles of C pairs (row, block); the pairs of a tile have one block.

  Tiles are sorted by block.

  Attributes:
    block: `[G]`, the block of each tile.
    pair: `[G, C]`, indices of the tile's pairs in the flattened `[R, M]`.
    is_pair: `[G, C]`, whether the pair exists; the last tile of a block has fewer.
    index: `[R, M]`, the index of each pair in the flattened `[G, C]`.
    is_valid: `[R, M]`, whether the pair has a block.
  """

  block: Any
  pair: Any
  is_pair: Any
  index: Any
  is_valid: Any

  @property
  def row(self):
    """The rows of the pairs, `[G, C]`."""
    return self.pair // self.index.shape[1]

  def pair_values(self, x):
    """Rearranges values `[G, C, …]` of tiles to values `[R, M, …]` of pairs."""
    x = _gather(x.reshape(-1, *x.shape[2:]), self.index)
    return jnp.where(_expand_mask(self.is_valid, x), x, 0)

  def tile_values(self, x):
    """Rearranges values `[R, M, …]` of pairs to values `[G, C, …]` of tiles."""
    x = _gather(x.reshape(-1, *x.shape[2:]), self.pair)
    return jnp.where(_expand_mask(self.is_pair, x), x, 0)


def _gather(x, index):
  """`x[index]`, computed with a flat index: with two axes, a TPU reads far more."""
  return x[index.reshape(-1)].reshape(*index.shape, *x.shape[1:])


def _expand_mask(keep, x):
  """Appends axes of 1 to a mask, up to the number of axes of x."""
  return keep.reshape(*keep.shape, *[1] * (x.ndim - keep.ndim))


# The indices of pairs and their inverse are both known, so the gradient of a gather is
# a gather as well. JAX's would be a scatter-add, which serialises repeated indices.


def _rows_backward(inputs, saved, grad):
  del saved
  _, tiles = inputs
  return jnp.sum(tiles.pair_values(grad), axis=1, dtype=jnp.float32), tiles


_tile_rows = with_backward(
  lambda inputs: (_gather(inputs[0], inputs[1].row), None), _rows_backward
)
"""(x `[R, …]`, tiles) -> the rows of each tile `[G, C, …]`."""


def _pairs_backward(inputs, saved, grads):
  del saved
  *_, tiles = inputs
  return *map(tiles.tile_values, grads), tiles


_pair_results = with_backward(
  lambda inputs: (tuple(map(inputs[-1].pair_values, inputs[:-1])), None),
  _pairs_backward,
)
"""(out `[G, C, …]`, lse, tiles) -> out and lse of each pair `[R, M, …]`."""


def _keys_backward(inputs, saved, grads):
  del saved
  key, _, tiles = inputs
  # A product with one-hot vectors, because a GPU serialises a scatter-add to one index.
  one_hot = jax.nn.one_hot(tiles.block, len(key), dtype=jnp.float32)

  def block_sums(x):
    # Factors of 16 bits are exact at any precision.
    precision = "default" if x.dtype.itemsize < 4 else "highest"
    x = x.astype(jnp.float32)
    return jnp.einsum("gb,g...->b...", one_hot, x, precision=precision)

  return *map(block_sums, grads), tiles


_tile_keys = with_backward(
  lambda inputs: (tuple(x[inputs[-1].block] for x in inputs[:-1]), None),
  _keys_backward,
)
"""(key `[G', D, H]`, value, tiles) -> the keys and values of each tile `[G, D, …]`."""


def _make_tiles(blocks: Int[Array, "R M"], count: int) -> _Tiles:
  """Sorts pairs into tiles; only the last tile of a block has fewer than C.

  So R·M/C tiles and one more per block are enough.
  """
  size, pairs = _TILE_ROWS, blocks.reshape(-1)
  ordered, order = jax.lax.sort_key_val(pairs, jnp.arange(pairs.size))
  start = jnp.searchsorted(ordered, jnp.arange(count + 1))
  tiles = -(-jnp.diff(start) // size)
  end = jnp.cumsum(tiles)
  number = jnp.arange(pairs.size // size + min(count, pairs.size))
  block = jnp.searchsorted(end, number, side="right")
  is_tile, block = block < count, jnp.minimum(block, count - 1)
  first = start - size * jnp.pad(end, (1, 0))
  rank = (first[block] + size * number)[:, None] + jnp.arange(size)[None]
  index = jnp.argsort(order) - first[pairs]
  is_valid = pairs < count
  return _Tiles(
    block=block,
    pair=_gather(order, jnp.clip(rank, 0, pairs.size - 1)),
    is_pair=is_tile[:, None] & (rank < start[block + 1][:, None]),
    index=jnp.where(is_valid, index, 0).reshape(blocks.shape),
    is_valid=is_valid.reshape(blocks.shape),
  )
