"""Shifted windows of a grid (Swin; Liu et al., 2021), as the paper defines it."""

from typing import Any

from jaxtyping import Bool
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def axis_pairs(
  coordinate: np.ndarray, size: int, window: int, shift: int
) -> tuple[np.ndarray, Bool[np.ndarray, "T S"], Bool[np.ndarray, "T S"]]:
  """Describes pairs of positions along one axis of a grid, from their coordinates.

  The axis is padded from `size` to whole windows and rolled: y = (coordinate − shift)
  mod padded. Returns y_t − y_s; whether both are in one window; and whether only the
  roll joins them, which moves the coordinates below `shift` to the end.
  """
  padded = -(-size // window) * window
  y = (coordinate - shift) % padded
  is_rolled = coordinate < shift
  same_window = y[:, None] // window == y // window
  return y[:, None] - y, same_window, is_rolled[:, None] != is_rolled


def window_2d_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  grid: tuple[int, int] | None,
  window: int,
  shift: int = 0,
  relative_bias: ArrayLike | None = None,
  hidden_logit: float | None = None,
  **options: Any,
) -> shared.Result:
  """Every query attends to the keys of its own window of a grid.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s + b[i]) v_s
    i = (dy + w − 1) · (2w − 1) + (dx + w − 1)

  A(t) has the keys in the window of t that are not joined to t by the roll alone; dy =
  y_t − y_s and dx = x_t − x_s are from `axis_pairs`. If the grid has at most w rows or
  columns, the side of the window is reduced to their number and there is no shift; b is
  still the table for w.

  Args:
    grid: (rows, columns) of the positions, in row-major order; None means ⌈√T⌉ columns
      and as many rows as needed, the last of which may be incomplete.
    window: w, the side of a window.
    shift: s.
    relative_bias: b, `[(2w − 1)², N]`.
    hidden_logit: if given, A(t) includes the keys that only the roll joins to t, and
      this number is added to their logits.
    **options: as `dense_attention`; is_causal must be False.

  Paper: Swin transformer, section 3.2, arXiv:2103.14030.
  """
  shared.check_both_directions(query, key, **options)
  _, length, num_heads, _ = np.shape(query)
  columns = int(np.ceil(np.sqrt(length)))
  rows, columns = grid or (int(np.ceil(length / columns)), columns)
  if grid is not None and rows * columns != length:
    raise ValueError(f"grid: expected {length} positions, got {grid}")
  side = window
  if min(rows, columns) <= window:
    side, shift = min(rows, columns), 0
  y, x = np.divmod(np.arange(length), columns)
  dy, same_rows, joined_rows = axis_pairs(y, rows, side, shift)
  dx, same_columns, joined_columns = axis_pairs(x, columns, side, shift)
  visible = same_rows & same_columns
  joined = joined_rows | joined_columns
  bias = np.zeros((num_heads, length, length))
  if relative_bias is not None:
    (table,) = shared.as_float64(relative_bias)
    index = (dy + window - 1) * (2 * window - 1) + (dx + window - 1)
    bias[:, visible] = table[index[visible]].T
  if hidden_logit is None:
    visible &= ~joined
  else:
    bias += np.where(joined, hidden_logit, 0.0)
  options |= {"bias": bias, "mask_mod": lambda b, n, t, s: visible[t, s]}
  return dense_attention(query, key, value, **options)
