"""How queries and keys are cut into tiles, and tiles into steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import platform
from attention.layout import cut, put
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
  one_visit: bool
  at_once: int
  size: int
  steps: int
  is_ragged: bool
  dropout_rate: float

  def start(self, i: Array) -> Array:
    """The first query of step i; the last step moves back."""
    return jnp.minimum(i * self.size, self.length - self.size)

  def starts(self, i: Array) -> Array:
    """The first query of its tile, or of each of its tiles."""
    start = self.start(i)
    if self.at_once == 1:
      return start
    return start + self.rows * jnp.arange(self.at_once)

  def take(
    self, x: Float[Array, "B T N F"], i: Array, old: float | None = None
  ) -> Float[Array, "..."]:
    """The rows of step i `[B, N, C, F]`, or `[n, B, N, C, F]` of n tiles.

    `old` is in place of those that the step before has had.
    """
    x = cut(x, self.start(i), self.size)
    if old is not None and self.is_ragged:
      x = jnp.where(self._is_new(i), x, old)
    if self.at_once == 1:
      return jnp.swapaxes(x, 1, 2)
    x = x.reshape(len(x), self.at_once, self.rows, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, 4)

  def put(
    self, x: Float[Array, "B T N F"], i: Array, rows: Float[Array, "..."]
  ) -> Float[Array, "B T N F"]:
    """`x` with the rows of step i, but those that the step before has had."""
    if self.at_once == 1:
      rows = jnp.swapaxes(rows, 1, 2)
    else:
      rows = rows.transpose(1, 0, 3, 2, 4)
      rows = rows.reshape(len(x), self.size, *x.shape[2:])
    if self.is_ragged:
      rows = jnp.where(self._is_new(i), rows, cut(x, self.start(i), self.size))
    return put(x, rows, self.start(i))

  def _is_new(self, i: Array) -> Bool[Array, "1 X 1 1"]:
    is_new = self.start(i) + jnp.arange(self.size) >= i * self.size
    return is_new[None, :, None, None]

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
  source_length = value.shape[1]
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
    one_visit=one_visit,
    at_once=at_once,
    size=size,
    steps=-(-length // size),
    is_ragged=length % size > 0,
    dropout_rate=dropout_rate,
  )
