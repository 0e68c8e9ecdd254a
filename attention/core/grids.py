"""Positions that lie on a grid of rows and columns, row after row."""

import math
from typing import Any

from attention import arguments


def check(grid: Any) -> None:
  """Checks the argument `grid`.

  Raises:
    ValueError: neither None nor two numbers of at least 1.
  """
  if grid is None:
    return
  if not isinstance(grid, tuple | list) or len(grid) != 2:
    raise ValueError(f"grid: expected (rows, columns) or None, got {grid!r}")
  for side in grid:
    arguments.check_at_least("grid", side, 1)


def nearest_square(length: int) -> tuple[int, int]:
  """⌈√T⌉ columns, and as many rows as it takes; the last may be incomplete."""
  columns = math.isqrt(length - 1) + 1
  return -(-length // columns), columns
