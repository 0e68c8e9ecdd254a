"""Shifted windows of a grid (Swin; Liu et al., 2021), as the paper defines it."""

from jaxtyping import Bool, Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def axis_pairs(
  place: np.ndarray, size: int, window: int, shift: int
) -> tuple[np.ndarray, Bool[np.ndarray, "T S"], Bool[np.ndarray, "T S"]]:
  """What one axis of a grid says of each pair of positions.

  Padded to whole windows, the axis is rolled: y = (place − shift) mod padded.

  Args:
    place: row or column of every position.
    size: how many rows or columns there are.
    window: w.
    shift: s.

  Returns:
    y_t − y_s; whether both are in one window; whether only the roll joins them,
    which brings what was before `shift` to the end.
  """
  padded = -(-size // window) * window
  y = (place - shift) % padded
  is_moved = place < shift
  return (
    y[:, None] - y,
    y[:, None] // window == y // window,
    is_moved[:, None] != is_moved,
  )


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
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every query attends to the keys of its own window of a grid.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s + b[i]) v_s
    i = (dy + w − 1) · (2w − 1) + (dx + w − 1)

  A(t) are the keys of the window of t that not only the roll brings there, and
  dy = y_t − y_s, dx = x_t − x_s, both by `axis_pairs`. Where the grid has at
  most w rows or columns, the window has as many and nothing is shifted; b stays
  the table of w.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    grid: (rows, columns) of the positions, row after row; None is ⌈√T⌉ columns
      and as many rows as it takes, of which the last may be incomplete.
    window: w, the side of a window.
    shift: s.
    relative_bias: b, `[(2w − 1)², N]`.
    hidden_logit: added to what only the roll joins, which then is in A(t).
    mask: key mask, True = attend, broadcastable to `[B, 1, 1, S]`.
    is_causal: must be False: a window has keys on all sides.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: `is_causal`, a grid without T positions, query and key of
      different lengths, or a mask that is not a key mask.

  Paper: Swin transformer: hierarchical vision transformer using shifted
  windows, section 3.2, arXiv:2103.14030.
  """
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, _ = query.shape
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if key.shape[1] != length:
    raise ValueError(f"key: expected length {length}, got {key.shape[1]}")
  if grid is None:
    columns = int(np.ceil(np.sqrt(length)))
    rows = int(np.ceil(length / columns))
  else:
    rows, columns = grid
    if rows * columns != length:
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
  tokens = shared.visible_tokens(mask, batch, length)
  return dense_attention(
    query,
    key,
    value,
    mask=tokens[:, None, None, :] & visible,
    scale=scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    bias=bias[None],
  )
