"""Positions in the order of windows, and back.

T positions lie on a grid of rows and columns, row after row. The grid is padded
at the bottom and right to whole windows of w × w, rolled by (−s, −s), and cut:

  [B, T, …]  ->  [B, P, …],  P = windows · w²

The positions of a window are neighbours in this order, so a tile is a slice.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from attention import arguments
from attention.core import grids


class Grid(NamedTuple):
  """How positions lie in windows.

  Attributes:
    length: T, at most rows · columns; only the last row may be incomplete.
    rows: of the grid.
    columns: of the grid.
    window: w, at most as large as the smaller of the two.
    shift: s, less than w.
  """

  length: int
  rows: int
  columns: int
  window: int
  shift: int

  @property
  def padded(self) -> tuple[int, int]:
    """Rows and columns of whole windows."""
    w = self.window
    return -(-self.rows // w) * w, -(-self.columns // w) * w

  @property
  def is_padded(self) -> bool:
    """Whether windows have places without a position."""
    return math.prod(self.padded) > self.length

  def to_windows(self, x: Shaped[Array, "B T *F"]) -> Shaped[Array, "B P *F"]:
    """Rows of `x` in the order of windows; places without one get zeros."""
    w, (rows, columns) = self.window, self.padded
    batch, length, *features = x.shape
    lacking = self.rows * self.columns - length
    x = _padded(x, lacking)
    x = x.reshape(batch, self.rows, self.columns, *features)
    x = _padded(x, rows - self.rows, columns - self.columns)
    x = jnp.roll(x, (-self.shift, -self.shift), (1, 2))
    x = x.reshape(batch, rows // w, w, columns // w, w, *features)
    return jnp.swapaxes(x, 2, 3).reshape(batch, rows * columns, *features)

  def from_windows(self, x: Shaped[Array, "B P *F"]) -> Shaped[Array, "B T *F"]:
    """Undoes `to_windows`."""
    w, (rows, columns) = self.window, self.padded
    batch, _, *features = x.shape
    x = x.reshape(batch, rows // w, columns // w, w, w, *features)
    x = jnp.swapaxes(x, 2, 3).reshape(batch, rows, columns, *features)
    x = jnp.roll(x, (self.shift, self.shift), (1, 2))
    x = x[:, : self.rows, : self.columns]
    return x.reshape(batch, -1, *features)[:, : self.length]

  def regions(self) -> Int[Array, "1 P"]:
    """A number for each place: those that only the roll joins have others."""
    rows, columns = jnp.divmod(jnp.arange(self.length), self.columns)
    rolled = 2 * (rows < self.shift) + (columns < self.shift)
    return self.to_windows(rolled[None])


def of_call(
  length: int, grid: tuple[int, int] | None, window: int, shift: int
) -> Grid:
  """The grid of a call, its arguments checked.

  Args:
    length: T.
    grid: (rows, columns); None is columns = ⌈√T⌉ and as many rows as it takes.
    window: side of a window. Where the grid has not more rows or columns, the
      window is as large as the smaller of them, and nothing is shifted.
    shift: how far the grid is rolled.

  Raises:
    ValueError: an argument is out of range, or the grid does not have T places.
  """
  check(grid, window, shift)
  if grid is None:
    rows, columns = grids.nearest_square(length)
  else:
    rows, columns = grid
    if rows * columns != length:
      raise ValueError(
        f"grid: expected rows · columns = {length}, the length of query, got "
        f"{rows} · {columns} = {rows * columns}"
      )
  smaller = min(rows, columns)
  if smaller <= window:
    window, shift = smaller, 0
  return Grid(length, rows, columns, window, shift)


def check(grid: tuple[int, int] | None, window: int, shift: int) -> None:
  """Checks what does not depend on a length.

  Raises:
    ValueError: an argument is out of range.
  """
  grids.check(grid)
  arguments.check_at_least("window", window, 1)
  arguments.check_at_least("shift", shift, 0)
  if shift >= window:
    raise ValueError(
      f"shift: expected less than window, {window}, got {shift}; half of it is "
      "usual"
    )


def table_index(side: int, window: int) -> Int[Array, "C C"]:
  """Where a table for windows of `window` has each pair of one of `side`.

  (dy + window − 1) · (2 · window − 1) + (dx + window − 1), dy = y_query − y_key
  and dx alike, C = side². A smaller window reads the middle of the table.
  """
  y, x = jnp.divmod(jnp.arange(side * side), side)
  dy, dx = (z[:, None] - z[None, :] + window - 1 for z in (y, x))
  return dy * (2 * window - 1) + dx


def _padded(x: Array, *more: int) -> Array:
  """`x` with so many zeros after each axis that follows the first."""
  rest = x.ndim - 1 - len(more)
  return jnp.pad(x, [(0, 0), *((0, n) for n in more), *[(0, 0)] * rest])
