"""Compressed attention of DeepSeek-V4 by definition."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.shared import Result


def compressed_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  window: int,
  entries: ArrayLike,
  stride: int,
  entry_values: ArrayLike | None = None,
  index_query: ArrayLike | None = None,
  index_key: ArrayLike | None = None,
  index_weight: ArrayLike | None = None,
  top_k: int | None = None,
  sinks: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
) -> Result:
  """One softmax over the last `window` keys and the entries of closed windows.

  A query sees all entries, or the `top_k` with the largest Σ_j w_tj relu(q_tj · k_i),
  the earlier of equal ones. A window is closed once it has `stride` unmasked positions.

  Code: DeepSeek-V4 in transformers 5.24.0.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value, entries = shared.as_float64(query, key, value, entries)
  batch, length, heads, head_dim = query.shape
  keep = shared.visible_tokens(mask, batch, length)
  values = entries
  if entry_values is not None:
    (values,) = shared.as_float64(entry_values)
  keys = np.concatenate([shared.zero_masked(key, keep), entries], axis=1)
  values = np.concatenate([shared.zero_masked(value, keep), values], axis=1)
  count = entries.shape[1]
  visible = np.zeros((batch, heads, length, length + count), bool)
  for b, t in np.ndindex(batch, length):
    near = slice(max(t - window + 1, 0), t + 1)
    visible[b, :, t, near] = keep[b, near]
    closed = range(keep[b, : t + 1].sum() // stride)
    if index_query is not None:
      a, k, w = (
        np.asarray(x, np.float64)
        for x in (index_query, index_key, index_weight)
      )
      scores = np.maximum(a[b, t] @ k[b].T, 0.0).T @ w[b, t]
      closed = sorted(closed, key=lambda i: (-scores[i], i))[:top_k]
    for i in closed:
      visible[b, :, t, length + i] = True
  keys = shared.repeat_heads(keys, heads)
  scale = shared.logit_scale(scale, head_dim)
  shape = batch, length, heads
  sinks = np.broadcast_to(-np.inf if sinks is None else sinks, shape)
  return shared.weighted_values(
    lambda b, n, t, s: shared.softmax(
      scale * keys[b, s, n] @ query[b, t, n], sinks[b, t, n]
    ),
    values,
    visible,
  )


def compressed_entries(
  rows: ArrayLike,
  gates: ArrayLike,
  position_bias: ArrayLike,
  *,
  keep: ArrayLike | None = None,
) -> Result:
  """Entry i pools series a of window i + a + 1 − A by softmax, for each feature.

  Windows consist of unmasked positions. The entries of open windows are zeros.

  Code: DeepSeek-V4 in transformers 5.24.0.
  """
  rows, gates, bias = shared.as_float64(rows, gates, position_bias)
  batch, length, series = rows.shape[:3]
  size = len(bias)
  keep = np.ones((batch, length), bool) if keep is None else np.asarray(keep)
  out = np.zeros((batch, length // size, *rows.shape[3:]))
  for b in range(batch):
    positions = np.flatnonzero(keep[b])
    for i in range(len(positions) // size):
      terms = [
        (
          rows[b, positions[first + j], a],
          gates[b, positions[first + j], a] + bias[j, a],
        )
        for a in range(series)
        for first in [(i + a + 1 - series) * size]
        for j in range(size)
        if first >= 0
      ]
      values, logits = (np.stack(x) for x in zip(*terms, strict=True))
      weights = np.exp(logits - logits.max(axis=0))
      out[b, i] = (weights / weights.sum(axis=0) * values).sum(axis=0)
  return out
