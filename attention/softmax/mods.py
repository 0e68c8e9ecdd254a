"""`score_mod` and `mask_mod`: functions of a score and its indices, as in
FlexAttention.

    score_mod(score, b, n, t, s) -> score        mask_mod(b, n, t, s) -> bool

b, n, t, s are integer arrays that broadcast to `[B, N, C, D]`, the scores of a tile,
and so do the results. A function is traced once for the shape of a tile. The arrays
that it closes over become arguments, so that gradients reach them. Inside
`jax.shard_map`, the gradient of an array that does not vary over a mesh axis is summed
over that axis once per tile, as JAX does for arrays that a loop closes over. With
`jax.lax.pcast(array, axes, to="varying")` outside the function, it is summed only once.

Paper: Flex attention, arXiv:2412.05496.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import checks
from attention.platform.derivative import vary, varying_axes

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mod:
  """A function of a tile, with the arrays that it closes over.

  Attributes:
    function: `(arrays, *arguments) -> result`.
    shape: the shape of a tile, (B, N, C, D); None before it is traced.
    arrays: the float arrays first, then the others, which have no gradient.
  """

  function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
  shape: tuple[int, int, int, int] | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  arrays: tuple[Any, ...] = ()

  def __call__(self, *arguments: Any, fixed: "Mod | None" = None) -> Array:
    """The result for one tile; `fixed` has the non-float arrays, from `partition`."""
    more = () if fixed is None else fixed.arrays
    return self.function((*self.arrays, *more), *arguments)

  def partition(self) -> tuple["Mod", "Mod"]:
    """The function with its float arrays only, and with its other arrays only."""
    count = sum(jnp.issubdtype(x.dtype, jnp.inexact) for x in self.arrays)
    floats, fixed = self.arrays[:count], self.arrays[count:]
    return (
      dataclasses.replace(self, arrays=floats),
      dataclasses.replace(self, arrays=fixed),
    )

  def indices(self, start: Any, first: Any) -> tuple[Int[Array, "..."], ...]:
    """b, n, t, s of the tile whose first query and first key are at given positions."""
    assert self.shape is not None
    return indices(self.shape, start, first)


def untraced(name: str, function: Callable[..., Any]) -> Mod:
  """Wraps a user's function, before the shape of a tile is known.

  Raises:
    ValueError: it is not a function.
  """
  if not callable(function):
    raise ValueError(
      f"{name}: expected a function, got {type(function).__name__}"
    )
  return Mod(lambda _, *arguments: function(*arguments))


def traced_score(
  score_mod: ScoreMod, shape: tuple[int, int, int, int], like: Any = ()
) -> Mod:
  """Traces a score_mod for tiles (B, N, C, D); see `traced_mask`."""

  def tile_score(score, *indices):
    return jnp.asarray(score_mod(score, *indices), jnp.float32)

  return _trace(tile_score, shape, like, has_score=True)


def traced_mask(
  mask_mod: MaskMod, shape: tuple[int, int, int, int], like: Any = ()
) -> Mod:
  """Traces a mask_mod for tiles (B, N, C, D).

  Inside `jax.shard_map`, the indices vary over the same mesh axes as the arrays `like`.
  Arrays that the function closes over keep their own type.

  Raises:
    ValueError: it does not return a bool for each pair.
  """
  return _trace(lambda *indices: as_bool(mask_mod(*indices)), shape, like)


def _trace(function, shape, like, has_score=False):
  """Traces a function of a tile, and makes the arrays it closes over arguments."""

  def operands():
    score = (jnp.zeros(shape, jnp.float32),) * has_score
    return vary((*score, *indices(shape, 0, 0)), axes)

  axes = varying_axes(like)
  closed = jax.make_jaxpr(
    lambda *arguments: jnp.broadcast_to(function(*arguments), shape)
  )(*jax.eval_shape(operands))
  consts = [jnp.asarray(x) for x in closed.consts]
  is_fixed = [not jnp.issubdtype(x.dtype, jnp.inexact) for x in consts]
  order = np.argsort(is_fixed, kind="stable")
  places = np.argsort(order)

  def call(arrays, *arguments):
    consts = [arrays[i] for i in places]
    return jax.core.eval_jaxpr(closed.jaxpr, consts, *vary(arguments, axes))[0]

  return Mod(call, shape, tuple(consts[i] for i in order))


def match_varying_except_mods(tree: Any) -> Any:
  """`match_varying` for all arrays but those of mods, whose types are fixed."""
  axes = varying_axes(tree)
  return jax.tree.map(
    lambda x: x if isinstance(x, Mod) else vary(x, axes),
    tree,
    is_leaf=lambda x: isinstance(x, Mod),
  )


def indices(
  shape: tuple[int, ...], start: Array | int, first: Array | int
) -> tuple[Int[Array, "..."], ...]:
  """b, n, t, s of scores (B, N, C, D), from the first query and the first key."""
  b, n, t, s = jnp.ogrid[tuple(slice(size) for size in shape)]
  return b, n, start + t, first + s


def as_bool(result: Any) -> Bool[Array, "..."]:
  """Checks that the result of a mask_mod is bool, and converts it to an array.

  Raises:
    ValueError: the result is not bool.
  """
  if jnp.result_type(result) != jnp.bool_:
    raise ValueError(f"mask_mod: expected bool, got {jnp.result_type(result)}")
  return jnp.asarray(result)


def mods_for_decode(
  score_mod: ScoreMod | None,
  mask_mod: MaskMod | None,
  bias: Float[Array, "B N 1 S"] | None,
  query: Int[Array, "B"],
  keys: Int[Array, "B S"],
) -> tuple[ScoreMod | None, MaskMod | None, Float[Array, "B N 1 S"] | None]:
  """Adapts both functions to one query of each example and the keys of a cache.

  The query of an example is at position `query`, and the keys in its cache are at
  positions `keys`. `bias` has the terms of the distance tables, which are part of the
  score that a score_mod gets.

  Returns:
    Both functions, with indices of the cache, and the bias that remains to be added.
  """
  t, s = query[:, None, None, None], keys[:, None, None, :]

  def cache_score(score, b, n, _t, _s):
    assert score_mod is not None
    return score_mod(score if bias is None else score + bias, b, n, t, s)

  def cache_mask(b, n, _t, _s):
    assert mask_mod is not None
    return mask_mod(b, n, t, s)

  return (
    None if score_mod is None else cache_score,
    None if mask_mod is None else cache_mask,
    bias if score_mod is None else None,
  )


_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
  """Which blocks of keys each block of queries visits; a pytree.

  Attributes:
    block_size: (C, D), queries and keys of a block.
    length: T.
    source_length: S.
    visited: for each block of queries, the numbers of its key blocks in ascending
      order, padded with 0.
    counts: the number of key blocks of each block of queries. If None, all numbers of
      `visited` are used, and those beyond the last block are skipped.
    tiles_per_step: the number of query blocks in a step; 1 with `counts`.
  """

  block_size: tuple[int, int] = dataclasses.field(metadata=_STATIC)
  length: int = dataclasses.field(metadata=_STATIC)
  source_length: int = dataclasses.field(metadata=_STATIC)
  visited: Any
  counts: Any = None
  tiles_per_step: int = dataclasses.field(default=1, metadata=_STATIC)

  @property
  def share(self) -> float:
    """The fraction of all blocks that are visited."""
    columns = -(-self.source_length // self.block_size[1])
    return float(self.counts.sum() / (len(self.counts) * columns))


def make_block_mask(
  mask_mod: MaskMod,
  *,
  batch: int = 1,
  num_heads: int = 1,
  length: int,
  source_length: int | None = None,
  block_size: int | tuple[int, int] = 128,
) -> BlockMask:
  """Finds the blocks in which a mask_mod allows any pair, in any example and head.

      block_mask = make_block_mask(mask_mod, length=4096)
      flash_attention(q, k, v, mask_mod=mask_mod, block_mask=block_mask)

  Call it once, outside `jax.jit`, for all calls with the same mask.

  Args:
    mask_mod: `(b, n, t, s) -> bool`.
    batch: B; 1 if all examples have the same mask.
    num_heads: N; 1 if all heads have the same mask.
    length: T.
    source_length: S; None means T.
    block_size: (C, D), or one int for both.

  Returns:
    A `BlockMask`.

  Raises:
    ValueError: a size is out of range, or `mask_mod` does not return bool.

  Cost: time B·N·T·S, a row of blocks at a time.
  """
  source_length = length if source_length is None else source_length
  sizes = block_size if isinstance(block_size, tuple) else (block_size,) * 2
  for name, size in (
    ("batch", batch),
    ("num_heads", num_heads),
    ("length", length),
    ("source_length", source_length),
    *(("block_size", size) for size in sizes),
  ):
    checks.check_at_least(name, size, 1)
  rows, width = min(sizes[0], length), min(sizes[1], source_length)
  columns = -(-source_length // width)
  shape = (batch, num_heads, rows, source_length)
  mod = traced_mask(untraced("mask_mod", mask_mod), shape)

  @jax.jit
  def visited_columns(start):
    visible = jnp.any(mod(*mod.indices(start, 0)), axis=(0, 1))
    visible &= (start + jnp.arange(rows) < length)[:, None]
    visible = jnp.any(visible, axis=0)
    visible = jnp.pad(visible, (0, columns * width - source_length))
    return jnp.any(visible.reshape(columns, width), axis=1)

  starts = range(0, length, rows)
  table = np.stack([np.asarray(visited_columns(start)) for start in starts])
  counts = table.sum(axis=1).astype(np.int32)
  visited = np.zeros((len(table), max(int(counts.max()), 1)), np.int32)
  for i, row in enumerate(table):
    visited[i, : counts[i]] = np.flatnonzero(row)
  return BlockMask((rows, width), length, source_length, visited, counts)
