"""Keys of every s-th row and column (CvT; Wu et al., 2021), by definition."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def strided_2d_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  grid: tuple[int, int] | None,
  stride: int,
  **options: Any,
) -> shared.Result:
  """Every query attends to the keys of every s-th row and column of a grid.

    A = {tokens before the grid} ∪ {(y, x) : y mod s = 0, x mod s = 0}
    out[t] = Σ_{s∈A} softmax_{s∈A}(scale · q_t · k_s) v_s

  Args:
    grid: (rows, columns) of the last positions, in row-major order; None means ⌈√T⌉
      columns and as many rows as needed, the last of which may be incomplete.
    stride: s.
    **options: as `dense_attention`; is_causal must be False.

  Paper: CvT, section 3.2, arXiv:2103.15808.
  """
  shared.check_both_directions(query, key, **options)
  length = np.shape(query)[1]
  if grid is None:
    columns, before = int(np.ceil(np.sqrt(length))), 0
  else:
    columns, before = grid[1], length - grid[0] * grid[1]
    if before < 0:
      raise ValueError(f"grid: expected at most {length} positions, got {grid}")
  position = np.arange(length) - before
  y, x = np.divmod(position, columns)
  visible = (position < 0) | ((y % stride == 0) & (x % stride == 0))
  options["mask_mod"] = lambda b, n, t, s: visible[s]
  return dense_attention(query, key, value, **options)
