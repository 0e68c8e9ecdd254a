"""Keys of every s-th row and column (CvT; Wu et al., 2021), as defined."""

from jaxtyping import Float64
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
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every query attends to the keys of every s-th row and column of a grid.

    A = {tokens before the grid} ∪ {(y, x) : y mod s = 0, x mod s = 0}
    out[t] = Σ_{s∈A} softmax_{s∈A}(scale · q_t · k_s) v_s

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    grid: (rows, columns) of the last positions, row after row; None is ⌈√T⌉
      columns and as many rows as it takes, of which the last may be incomplete.
    stride: s.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: must be False.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: `is_causal`, a grid of more than T positions, or query and key of
      different lengths.

  Paper: CvT: introducing convolutions to vision transformers, section 3.2,
  arXiv:2103.15808.
  """
  query, key, value = shared.as_float64(query, key, value)
  length = query.shape[1]
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if key.shape[1] != length:
    raise ValueError(f"key: expected length {length}, got {key.shape[1]}")
  if grid is None:
    columns, before = int(np.ceil(np.sqrt(length))), 0
  else:
    columns, before = grid[1], length - grid[0] * grid[1]
    if before < 0:
      raise ValueError(f"grid: expected at most {length} positions, got {grid}")
  place = np.arange(length) - before
  y, x = np.divmod(place, columns)
  seen = (place < 0) | ((y % stride == 0) & (x % stride == 0))
  allowed = np.ones((1, 1, 1, 1), bool) if mask is None else np.asarray(mask)
  return dense_attention(
    query,
    key,
    value,
    mask=allowed & seen,
    scale=scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
