"""Longformer's sliding window (Beltagy 2020), as the paper defines it."""

from collections.abc import Callable, Sequence

from jaxtyping import Bool, Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def in_window(
  length: int,
  source_length: int,
  window: int | Sequence[int],
  dilation: int | Sequence[int],
  num_heads: int,
) -> Bool[np.ndarray, "N T S"]:
  """The pairs with s = t + i · dilation_n and −left ≤ i ≤ right."""
  left, right = (window, window) if isinstance(window, int) else window
  distance = np.arange(source_length)[None] - np.arange(length)[:, None]
  spacing = np.broadcast_to(dilation, num_heads)[:, None, None]
  i, rest = np.divmod(distance, spacing)
  return (rest == 0) & (-left <= i) & (i <= right)


def attended_pairs(
  shape: tuple[int, int, int, int],
  *,
  window: int | Sequence[int],
  dilation: int | Sequence[int] = 1,
  global_indices: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Bool[np.ndarray, "B N T S"]:
  """The pairs of A(t): in the window, or with a global query or a global key.

  Every pair is further limited by the mask, causality and the segments.

  Args:
    shape: (B, N, T, S).
    window: as in `sliding_window_attention`, with all other options.
    dilation: one int, or one for each of the N heads.
    global_indices: `[B, G]`.
    mask: broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    query_segment_ids: `[B, T]`.
    key_segment_ids: `[B, S]`.
  """
  batch, num_heads, length, source_length = shape
  near = in_window(length, source_length, window, dilation, num_heads)
  attended = np.repeat(near[None], batch, axis=0)
  if global_indices is not None:
    for b, s in enumerate(np.asarray(global_indices)):
      tokens = s[(s >= 0) & (s < length)]
      attended[b, :, tokens, :] = True
      attended[b, :, :, tokens] = True
  return attended & shared.visible_pairs(
    shape,
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )


def sliding_window_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  window: int | Sequence[int],
  dilation: int | Sequence[int] = 1,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  relative_bias: ArrayLike | None = None,
  relative_keys: ArrayLike | None = None,
  sinks: ArrayLike | None = None,
  logits_soft_cap: float | None = None,
  log_forget: ArrayLike | None = None,
  score_mod: Callable[..., ArrayLike] | None = None,
  mask_mod: Callable[..., ArrayLike] | None = None,
  global_indices: ArrayLike | None = None,
  global_qkv: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every query attends to the keys near it and to a few global ones.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s) v_s
    A(t) = {t + i·dilation : −left ≤ i ≤ right} ∪ {s global}
    A(t) = all s                                        for a global t

  It is one softmax over the union. A global query is read from `global_qkv`,
  with the keys and values that it sees, where that is given.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    window: w for left = right = w, or (left, right).
    dilation: one int, or one for each of the N heads.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    relative_bias: `[N, 2L+1]`, entry L + i is added to the logit of the key at
      distance i·dilation.
    relative_keys: `[2L+1, H]`, entry L + i is added to that key; or a table for
      each head, `[N, 2L+1, H]`.
    sinks: `[N]`, a logit for each head in the sum of the softmax alone.
    logits_soft_cap: c; scale · q · k becomes c · tanh(scale · q · k / c).
    log_forget: `[B, T, N]`; Σ over s < u ≤ t is added, in causal calls;
      positions that the mask hides forget nothing.
    score_mod: `(score, b, n, t, s) -> score`.
    mask_mod: `(b, n, t, s) -> bool`.
    global_indices: `[B, G]`; an index outside [0, T), such as −1, names no
      token.
    global_qkv: the paper's separate projections (query, key, value) for global
      queries.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: `global_qkv` without `global_indices`, or relative tables with
      them: a global key has no place in the window.

  Paper: Longformer, the long-document transformer, section 3.1,
  arXiv:2004.05150.
  """
  if global_qkv is not None and global_indices is None:
    raise ValueError("global_qkv: expected global_indices with it, got None")
  has_tables = relative_bias is not None or relative_keys is not None
  if has_tables and global_indices is not None:
    raise ValueError(
      "global_indices: expected None with relative_bias or relative_keys"
    )
  local = shared.as_float64(query, key, value)
  of_global = local if global_qkv is None else shared.as_float64(*global_qkv)
  batch, length, num_heads, head_dim = local[0].shape
  attended = attended_pairs(
    (batch, num_heads, length, local[1].shape[1]),
    window=window,
    dilation=dilation,
    global_indices=global_indices,
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  scale = shared.logit_scale(scale, head_dim)
  spacing = np.broadcast_to(dilation, num_heads)
  relative_bias, relative_keys = shared.relative_tables(
    relative_bias, relative_keys, num_heads, head_dim
  )
  if global_indices is None:
    global_indices = np.zeros((batch, 0), int)
  global_indices = np.asarray(global_indices)
  sinks = np.broadcast_to(-np.inf if sinks is None else sinks, num_heads)
  forgotten = None
  if log_forget is not None:
    if not is_causal or global_indices.size or spacing.max() > 1:
      raise ValueError(
        "log_forget: expected a causal window of neighbours alone"
      )
    forgotten = np.cumsum(shared.forget_of_visible(log_forget, mask), axis=1)

  out = np.zeros((*local[0].shape[:3], local[2].shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    query, key, value = of_global if t in global_indices[b] else local
    k = n // (num_heads // key.shape[2])
    s = np.flatnonzero(attended[b, n, t])
    s = s[shared.shown(mask_mod, b, n, t, s)]
    i = (s - t) // spacing[n]
    logits = scale * key[b, s, k] @ query[b, t, n]
    logits = shared.capped(logits, logits_soft_cap)
    distant = shared.at_distance(relative_keys[n], i)
    logits += scale * distant @ query[b, t, n]
    logits += shared.at_distance(relative_bias[n], i)
    if score_mod is not None:
      logits = np.asarray(score_mod(logits, b, n, t, s), np.float64)
    if forgotten is not None:
      logits += forgotten[b, t, n] - forgotten[b, s, n]
    out[b, t, n] = shared.softmax(logits, sinks[n]) @ value[b, s, k]
  return out
