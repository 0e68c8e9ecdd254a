"""What a tile of `flash_attention` sees: all keys, one block after another.

The last block of keys moves back to end at S, so that no array is padded. A key
that two blocks share counts in the first only. In a causal call, blocks above
the diagonal are not visited, and blocks below it need no mask. Masks and biases
are read block by block along the axes that they have, so one of `[B, 1, 1, S]`
never grows.
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.core import dropout, forgetting, layout, loop, platform
from attention.core.ring import Limits
from attention.core.tile import Keys, Score
from attention.mods import BlockMask


class Arrays(NamedTuple):
  """Arrays with a derivative, except queries and parameters of the score."""

  key: Float[Array, "..."]
  value: Float[Array, "B S K V"]
  bias: Float[Array, "#B #N #T #S"] | None = None
  forgotten: Float[Array, "B T N 2"] | None = None


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The `loop.Source` of blocks of keys.

  Attributes:
    width: D, keys of a block, at most S.
    source_length: S.
    is_causal: blocks above the diagonal are left out.
    dropout_rate: share of weights set to zero.
    block_mask: which blocks of keys a block of queries visits; None is all.
  """

  rows: int
  kv_heads: int
  num_heads: int
  score: Score
  by_data: bool
  width: int
  source_length: int
  is_causal: bool = False
  dropout_rate: float = 0.0
  at_once: int = 1
  block_mask: BlockMask | None = None

  def visits(
    self, start: Array | int
  ) -> tuple[int | Array, int | Array] | None:
    """The number of blocks in which every pair counts, and of all blocks."""
    length, width = self.source_length, self.width
    if self.block_mask is not None:
      return 0, jnp.asarray(self.block_mask.counts)[self._row(start)]
    if length == width:
      return None
    seen, whole = length, length // width
    if self.is_causal:
      seen = jnp.minimum(seen, start + self.rows)
      whole = jnp.minimum(whole, (start + 1) // width)
    end = (seen + width - 1) // width
    return 0 if self.by_data else whole, end

  def _row(self, start: Array | int) -> Array | int:
    """The number of a block of queries; the last one moves back."""
    return (start + self.rows - 1) // self.rows

  def _block(self, place: loop.Place) -> Array | int:
    """The number of the block of keys of a visit."""
    if self.block_mask is None:
      return place.visit
    visited = jnp.asarray(self.block_mask.visited)
    return visited[self._row(place.start), place.visit]

  def _first(self, place: loop.Place) -> Array | int:
    last = self.source_length - self.width
    return jnp.minimum(self._block(place) * self.width, last) if last else 0

  def gather(self, arrays: Arrays, fixed: Limits, place: loop.Place) -> Keys:
    """One block of keys, values and bias."""
    first, bias = self._first(place), arrays.bias

    def read(x):
      x = fixed.sees.readable(layout.cut(x, first, self.width), first)
      return platform.apart(layout.heads_first(x, x.shape[2]))

    if bias is not None:
      corner, sizes = self._corner(bias, place), self._sizes(bias)
      bias = jax.lax.dynamic_slice(bias, corner, sizes)
      bias = layout.by_kv_head(bias.astype(jnp.float32), self.kv_heads)
    if arrays.forgotten is not None:
      of_query = layout.cut(arrays.forgotten, place.start, self.rows)
      of_key = layout.cut(arrays.forgotten, first, self.width)
      more = forgetting.between(of_query, of_key)
      pairs = cast(Array, layout.by_kv_head(more, self.kv_heads))
      bias = pairs if bias is None else bias + pairs
    return Keys(read(arrays.key), read(arrays.value), bias)

  def limit(
    self, keys: Keys, fixed: Limits, place: loop.Place, *, is_whole: bool
  ) -> Keys:
    """Which pairs count, and which of them dropout keeps."""
    first, visible, kept = self._first(place), None, None
    if not is_whole:
      visible = fixed.sees.block(
        place.start,
        self.rows,
        first,
        self.width,
        self._block(place) * self.width,
      )
      visible = layout.by_kv_head(visible, self.kv_heads)
    if self.dropout_rate:
      kept = dropout.of_pairs(
        fixed.rng,
        self.dropout_rate,
        len(keys.value),
        self.num_heads,
        fixed.origin + place.start + jnp.arange(self.rows),
        fixed.origin + fixed.shift + first + jnp.arange(self.width),
      )
      kept = layout.by_kv_head(kept, self.kv_heads)
    offset = first - place.start + fixed.shift
    start = fixed.origin + place.start
    return keys._replace(visible=visible, kept=kept, offset=offset, start=start)

  def add(
    self, totals: Arrays, gradient: Keys, fixed: Limits, place: loop.Place
  ) -> Arrays:
    """Adds the gradients of one block at the places of its keys."""
    del fixed
    first, bias, forgotten = self._first(place), *totals[2:]
    key, value = (
      layout.add(total, layout.heads_last(x, self.width), first)
      for total, x in zip(totals[:2], gradient[:2], strict=True)
    )
    pairs = gradient.bias
    if pairs is not None:
      pairs = pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:])
    if forgotten is not None and pairs is not None:
      of_query, of_key = forgetting.gradients(pairs)
      forgotten = layout.add(forgotten, of_query, place.start)
      forgotten = layout.add(forgotten, of_key, first)
    if bias is not None and pairs is not None:
      lacking = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
      part = jnp.sum(pairs, lacking, keepdims=True)
      corner = self._corner(bias, place)
      part += jax.lax.dynamic_slice(bias, corner, part.shape)
      bias = jax.lax.dynamic_update_slice(bias, part, corner)
    return Arrays(key, value, bias, forgotten)

  def _corner(self, bias: Array, place: loop.Place) -> list[Array | int]:
    """Where a block of the bias starts."""
    start = [0, 0, place.start, self._first(place)]
    return [x if n > 1 else 0 for x, n in zip(start, bias.shape, strict=True)]

  def _sizes(self, bias: Array) -> list[int]:
    """The sizes of a block of the bias."""
    full = [*bias.shape[:2], self.rows, self.width]
    return [x if n > 1 else 1 for x, n in zip(full, bias.shape, strict=True)]
