"""Functions of a score and its indices, as FlexAttention has them.

    score_mod(score, b, n, t, s) -> score        mask_mod(b, n, t, s) -> bool

b, n, t, s are arrays of whole numbers that broadcast against `[B, N, C, D]`, the scores
of a tile; so do the results. A function is traced once for the shape of a tile, and
the arrays that it closes over become arguments, so that gradients reach them.

Paper: Flex attention, arXiv:2412.05496.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

ScoreMod = Callable[..., Any]
MaskMod = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
  """A function of the arrays of a tile, without what it closed over.

  Attributes:
    function: `(consts, *arrays) -> result`.
    shape: of a tile, (B, N, C, D).
  """

  function: Callable[..., Array]
  shape: tuple[int, int, int, int]

  def indices(
    self, start: Array | int, first: Array | int
  ) -> tuple[Int[Array, "..."], ...]:
    """b, n, t, s of a tile whose first query and key are at these positions."""
    return indices(self.shape, start, first)


def indices(
  shape: tuple[int, int, int, int], start: Array | int, first: Array | int
) -> tuple[Int[Array, "..."], ...]:
  """b, n, t, s of scores (B, N, C, D) from a query and a key on."""
  batch, heads, rows, width = shape
  return (
    jnp.arange(batch)[:, None, None, None],
    jnp.arange(heads)[None, :, None, None],
    (start + jnp.arange(rows))[None, None, :, None],
    (first + jnp.arange(width))[None, None, None, :],
  )


def of_position(
  score_mod: ScoreMod | None,
  mask_mod: MaskMod | None,
  bias: Float[Array, "B N 1 S"] | None,
  query: Int[Array, "B"],
  keys: Int[Array, "B S"],
) -> tuple[ScoreMod | None, MaskMod | None, Float[Array, "B N 1 S"] | None]:
  """Both functions for one query of each example, whose keys lie in a cache.

  Args:
    score_mod: of positions; None is none.
    mask_mod: likewise.
    bias: terms by distance, which a score_mod gets with the score.
    query: t of each example.
    keys: s of each slot; what lies in unset ones does not matter.

  Returns:
    The functions of places in the cache, and what is left of the bias.
  """

  def moved(function, before=None):
    def call(*args):
      *score, b, n, _, _ = args
      if before is not None:
        score = [score[0] + before]
      t, s = query[:, None, None, None], keys[:, None, None, :]
      return function(*score, b, n, t, s)

    return call

  own_score = own_mask = None
  if score_mod is not None:
    own_score, bias = moved(score_mod, bias), None
  if mask_mod is not None:
    own_mask = moved(mask_mod)
  return own_score, own_mask, bias


def is_shown(found: Any) -> Bool[Array, "..."]:
  """What a mask_mod returned.

  Raises:
    ValueError: it is not of bool.
  """
  if jnp.result_type(found) != jnp.bool_:
    raise ValueError(f"mask_mod: expected bool, got {jnp.result_type(found)}")
  return jnp.asarray(found)


def trace_score(
  score_mod: ScoreMod, shape: tuple[int, int, int, int]
) -> tuple[Traced, tuple[Array, ...]]:
  """A score_mod for tiles of a shape, and the arrays that it closes over.

  Raises:
    ValueError: it does not return a score for each pair.
  """
  return _trace("score_mod", score_mod, shape, [jnp.float32])


def trace_mask(
  mask_mod: MaskMod, shape: tuple[int, int, int, int]
) -> tuple[Traced, tuple[Array, ...]]:
  """Likewise a mask_mod."""
  return _trace("mask_mod", mask_mod, shape, [])


def _trace(name, function, shape, scores):
  if not callable(function):
    raise ValueError(
      f"{name}: expected a function, got {type(function).__name__}"
    )
  blank = Traced(lambda *_: jnp.zeros(()), shape)
  examples = jax.eval_shape(lambda: blank.indices(0, 0))
  given = [jax.ShapeDtypeStruct(shape, dtype) for dtype in scores]

  def whole(*arrays):
    found = function(*arrays)
    found = jnp.asarray(found, jnp.float32) if scores else is_shown(found)
    return jnp.broadcast_to(found, shape)

  closed = jax.make_jaxpr(whole)(*given, *examples)

  def call(consts, *arrays):
    return jax.core.eval_jaxpr(closed.jaxpr, consts, *arrays)[0]

  return Traced(call, shape), tuple(map(jnp.asarray, closed.consts))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
  """Which blocks of keys each block of queries visits.

  Attributes:
    block_size: (C, D), queries and keys of a block.
    length: T.
    source_length: S.
    visited: for each block of queries the numbers of its blocks of keys, first ones
      first, filled up with 0.
    counts: how many each has.
  """

  block_size: tuple[int, int]
  length: int
  source_length: int
  visited: np.ndarray
  counts: np.ndarray

  @property
  def share(self) -> float:
    """The fraction of all blocks that is visited."""
    return float(
      self.counts.sum()
      / (len(self.counts) * -(-self.source_length // self.block_size[1]))
    )


def make_block_mask(
  mask_mod: MaskMod,
  *,
  batch: int = 1,
  num_heads: int = 1,
  length: int,
  source_length: int | None = None,
  block_size: int | tuple[int, int] = 128,
) -> BlockMask:
  """The blocks in which a mask_mod shows any pair, of any example and head.

      block_mask = make_block_mask(mask_mod, length=4096)
      flash_attention(q, k, v, mask_mod=mask_mod, block_mask=block_mask)

  Made once, outside `jax.jit`, for all calls with the same mask.

  Args:
    mask_mod: `(b, n, t, s) -> bool`.
    batch: B; 1 where the mask is that of all examples.
    num_heads: N; 1 where it is that of all heads.
    length: T.
    source_length: S; None is T.
    block_size: (C, D), or one int for both.

  Returns:
    A `BlockMask`.

  Raises:
    ValueError: a size is out of range, or `mask_mod` returns no bool.

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
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
      raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
  rows, width = min(sizes[0], length), min(sizes[1], source_length)
  columns = -(-source_length // width)
  shape = (batch, num_heads, rows, source_length)
  traced, consts = trace_mask(mask_mod, shape)

  @jax.jit
  def seen(start):
    shown = traced.function(consts, *traced.indices(start, 0))
    shown = jnp.any(shown, axis=(0, 1))
    shown &= (start + jnp.arange(rows) < length)[:, None]
    shown = jnp.any(shown, axis=0)
    shown = jnp.pad(shown, (0, columns * width - source_length))
    return jnp.any(shown.reshape(columns, width), axis=1)

  starts = range(0, length, rows)
  table = np.stack([np.asarray(seen(start)) for start in starts])
  counts = table.sum(axis=1).astype(np.int32)
  visited = np.zeros((len(table), max(int(counts.max()), 1)), np.int32)
  for i, row in enumerate(table):
    visited[i, : counts[i]] = np.flatnonzero(row)
  return BlockMask((rows, width), length, source_length, visited, counts)


def modified(
  mod: Traced,
  consts: Sequence[Array],
  scores: Float[Array, "B N C D"],
  start: Array | int,
  first: Array | int,
) -> Float[Array, "B N C D"]:
  """What a score_mod makes of the scores of a tile."""
  return mod.function(tuple(consts), scores, *mod.indices(start, first))


def shown(
  mod: Traced, consts: Sequence[Array], start: Array | int, first: Array | int
) -> Bool[Array, "B N C D"]:
  """Which pairs of a tile a mask_mod shows."""
  return mod.function(tuple(consts), *mod.indices(start, first))
