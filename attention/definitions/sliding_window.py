"""Longformer's sliding window (Beltagy et al., 2020), as the paper defines it."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Bool
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def attended_pairs(
  query: ArrayLike,
  key: ArrayLike,
  *,
  window: int | Sequence[int],
  dilation: int | Sequence[int] = 1,
  global_indices: ArrayLike | None = None,
  **options: Any,
) -> Bool[np.ndarray, "B N T S"]:
  """The pairs of A(t): those in the window, or with a global query or a global key.

  The `options` are those of `shared.visible_pairs`, which exclude more pairs.
  """
  batch, length, num_heads, _ = np.shape(query)
  left, right = (window, window) if isinstance(window, int) else window
  distance = np.arange(np.shape(key)[1]) - np.arange(length)[:, None]
  spacing = np.broadcast_to(dilation, num_heads)[:, None, None]
  i, rest = np.divmod(distance, spacing)
  in_window = (rest == 0) & (-left <= i) & (i <= right)
  attended = np.repeat(in_window[None], batch, axis=0)
  if global_indices is not None:
    for b, s in enumerate(np.asarray(global_indices)):
      tokens = s[(s >= 0) & (s < length)]
      attended[b, :, tokens, :] = True
      attended[b, :, :, tokens] = True
  return attended & shared.visible_pairs(query, key, **options)


def _distance_table(table: np.ndarray, spacing: np.ndarray) -> np.ndarray:
  """Converts a table `[N, 2L+1, …]` indexed by i to one indexed by i · spacing_n."""
  longest = table.shape[1] // 2
  distance = np.arange(-longest * spacing.max(), longest * spacing.max() + 1)
  rows = zip(table, distance // spacing[:, None], strict=True)
  return np.stack([shared.at_distance(entries, i) for entries, i in rows])


def sliding_window_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  window: int | Sequence[int],
  dilation: int | Sequence[int] = 1,
  relative_bias: ArrayLike | None = None,
  relative_keys: ArrayLike | None = None,
  relative_queries: ArrayLike | None = None,
  mask_mod: Callable[..., ArrayLike] | None = None,
  global_indices: ArrayLike | None = None,
  global_qkv: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
  **options: Any,
) -> shared.Result:
  """Every query attends to the keys in its window and to a few global keys.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s) v_s
    A(t) = {t + i·dilation : −left ≤ i ≤ right} ∪ {s global}
    A(t) = all s                                        for a global t

  It is one softmax over the union. If `global_qkv` is given, global queries and their
  keys and values come from it.

  Args:
    window: w for left = right = w, or (left, right).
    dilation: one int, or one per head.
    relative_bias: `[N, 2L+1]`, indexed by the i of A(t).
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, indexed by the i of A(t).
    relative_queries: as `relative_keys`.
    mask_mod: `(b, n, t, s) -> bool`.
    global_indices: `[B, G]`; indices outside [0, T), such as −1, are ignored. Relative
      tables have no entries for global keys.
    global_qkv: the paper's separate projections (query, key, value) for global
      queries.
    **options: as `dense_attention`.

  Paper: Longformer, section 3.1, arXiv:2004.05150.
  """
  vectors = {
    "relative_keys": relative_keys,
    "relative_queries": relative_queries,
  }
  has_tables = any(
    table is not None for table in (relative_bias, *vectors.values())
  )
  if global_qkv is not None and global_indices is None:
    raise ValueError("global_qkv: expected global_indices with it, got None")
  if has_tables and global_indices is not None:
    raise ValueError(
      "global_indices: expected None with relative_bias, relative_keys or "
      "relative_queries"
    )
  _, length, num_heads, _ = np.shape(query)
  spacing = np.broadcast_to(dilation, num_heads)
  if relative_bias is not None:
    table = np.asarray(relative_bias)
    options["relative_bias"] = _distance_table(table, spacing)
  for name, table in vectors.items():
    if table is not None:
      tables = np.asarray(table)
      tables = np.broadcast_to(tables, (num_heads, *tables.shape[-2:]))
      options[name] = _distance_table(tables, spacing)
  attended = attended_pairs(
    query,
    key,
    window=window,
    dilation=dilation,
    global_indices=global_indices,
  )

  def is_attended(b, n, t, s):
    allowed = True if mask_mod is None else np.asarray(mask_mod(b, n, t, s))
    return attended[b, n, t, s] & allowed

  out = dense_attention(query, key, value, mask_mod=is_attended, **options)
  if global_qkv is not None:
    matches = np.asarray(global_indices)[:, None] == np.arange(length)[:, None]
    is_global = matches.any(axis=-1)[:, :, None, None]
    global_out = dense_attention(*global_qkv, mask_mod=is_attended, **options)
    out = np.where(is_global, global_out, out)
  return out
