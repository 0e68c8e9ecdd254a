"""How queries and keys are cut into tiles, and tiles into steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import platform
from attention.layout import heads_first, heads_last
from attention.visible import Visible

_ONE_VISIT = 2048
"""The most keys of a window that a block of queries takes at once."""


class Grid(NamedTuple):
  """How queries and keys are cut; known while tracing.

  Attributes:
    rows: C.
    width: D.
    length: T.
    source_length: S.
    kv_heads: K.
    one_visit: whether D keys hold the span of any C queries.
    at_once: tiles of a step; 1 unless each has one visit.
    size: queries of a step.
    steps: how many there are.
    is_ragged: whether the last step moves back, over rows of the step before.
    dropout_rate: share of weights set to zero.
  """

  rows: int
  width: int
  length: int
  source_length: int
  kv_heads: int
  one_visit: bool
  at_once: int
  size: int
  steps: int
  is_ragged: bool
  dropout_rate: float

  def where_new(self, i: Array, x: Array, old: Array | int) -> Array:
    """`x` `[B, X, N, D]`, but `old` in rows that the step before has had."""
    if not self.is_ragged:
      return x
    is_new = self.start(i) + jnp.arange(self.size) >= i * self.size
    return jnp.where(is_new[None, :, None, None], x, old)

  def start(self, i: Array) -> Array:
    """The first query of step i; the last step moves back."""
    return jnp.minimum(i * self.size, self.length - self.size)

  def starts(self, i: Array) -> Array:
    """The first query of its tile, or of each of its tiles."""
    start = self.start(i)
    if self.at_once == 1:
      return start
    return start + self.rows * jnp.arange(self.at_once)

  def split(self, x: Float[Array, "B X N D"]) -> Float[Array, "..."]:
    """Rows of a step by tile: `[n, B, K, Q, D]`, without n where it is 1."""
    if self.at_once == 1:
      return heads_first(x, self.kv_heads)
    x = x.reshape(len(x), self.at_once, self.rows, *x.shape[2:])
    return jax.vmap(heads_first, (1, None))(x, self.kv_heads)

  def join(self, x: Float[Array, "..."]) -> Float[Array, "B X N D"]:
    """Undoes `split`."""
    if self.at_once == 1:
      return heads_last(x, self.rows)
    x = jax.vmap(heads_last, (0, None), 1)(x, self.rows)
    return x.reshape(len(x), self.size, *x.shape[3:])

  def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one tile, for the tiles of a step."""
    return function if self.at_once == 1 else jax.vmap(function)

  def visits(self, visible: Visible, start: Array) -> Array | int:
    """How many blocks of keys the queries from `start` on take."""
    if visible.block_mask is not None:
      visited, counts = visible.block_mask.visited, visible.block_mask.counts
      return visited.shape[1] if counts is None else counts[self._row(start)]
    low, high = visible.span(start, self.rows, self.source_length)
    count = -(-(high - low) // self.width)
    # A number lets JAX differentiate the loop in reverse.
    return count if isinstance(count, int) else jnp.maximum(0, count)

  def first(
    self, visible: Visible, start: Array, visit: Array | int
  ) -> tuple[Array, Array | int | None]:
    """The first key of a visit, and the first that no visit before has had."""
    table = visible.block_mask
    if table is not None:
      fresh = table.visited[self._row(start), visit] * self.width
      from_zero = table.counts is not None
    else:
      low, _ = visible.span(start, self.rows, self.source_length)
      fresh = low + visit * self.width
      from_zero = visible.left is None
    first = jnp.minimum(fresh, self.source_length - self.width)
    is_even = from_zero and self.source_length % self.width == 0
    return first, None if self.one_visit or is_even else fresh

  def _row(self, start: Array) -> Array:
    return (start + self.rows - 1) // self.rows


def grid_of(
  query: Float[Array, "B T N H"],
  value: Float[Array, "B S L V"],
  visible: Visible,
  block: tuple[int | None, int | None] | None = None,
  dropout_rate: float = 0.0,
) -> Grid:
  """How a call is cut; see `attend`."""
  batch, length, num_heads, head_dim = query.shape
  source_length, kv_heads = value.shape[1:3]
  rows, width = block or (None, None)
  one_visit = False
  if visible.block_mask is not None:
    rows, width = visible.block_mask.block_size
  elif visible.left is not None and visible.right is not None:
    reach = min(visible.left, length) + min(visible.right, source_length)
    rows = min(rows or platform.window_rows(reach + 1), length)
    wide = min(source_length, rows + reach)
    width = width or min(wide, _ONE_VISIT)
    one_visit = width >= wide
  if rows is None or width is None:
    least = platform.LEAST_ROWS, platform.LEAST_ROWS // 2
    pair_bytes = 4 * batch * num_heads
    chosen = platform.block(pair_bytes, *least, length, source_length)
    rows, width = rows or chosen[0], width or chosen[1]
  rows, width = min(rows, length), min(width, source_length)
  one_visit |= width == source_length and visible.block_mask is None
  at_once = 1
  if visible.block_mask is not None:
    at_once = visible.block_mask.at_once
  elif one_visit and width < source_length:
    tile_bytes = 4 * batch * num_heads * width
    tile_bytes *= rows + head_dim + value.shape[3]
    count = -(-length // rows)
    at_once = platform.tiles_at_once(tile_bytes, count)
    if length % rows:
      # One step for all tiles needs an array of a whole number of tiles.
      at_once = min(at_once, -(-count // 2))
  size = rows * at_once
  return Grid(
    rows=rows,
    width=width,
    length=length,
    source_length=source_length,
    kv_heads=kv_heads,
    one_visit=one_visit,
    at_once=at_once,
    size=size,
    steps=-(-length // size),
    is_ragged=length % size > 0,
    dropout_rate=dropout_rate,
  )
