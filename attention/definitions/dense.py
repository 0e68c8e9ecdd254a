"""Dense softmax attention (Vaswani et al., 2017), as the paper defines it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def dense_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  bias: ArrayLike | None = None,
  relative_bias: ArrayLike | None = None,
  relative_keys: ArrayLike | None = None,
  relative_queries: ArrayLike | None = None,
  sinks: ArrayLike | None = None,
  logits_soft_cap: float | None = None,
  log_forget: ArrayLike | None = None,
  score_mod: Callable[..., ArrayLike] | None = None,
  mask_mod: Callable[..., ArrayLike] | None = None,
) -> shared.Result:
  """Every query attends to every visible key: softmax(scale · Q Kᵀ + bias) V.

    logit[t, s] = cap(scale · q_t · k_s) + scale · q_t · a[i] + scale · k_s · c[i]
                  + bias[t, s] + b[i] + Σ_{s<u≤t} log f_u
    out[t] = Σ_s softmax_s(logit[t, s]) v_s            i = clip(s − t, −L, L)

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    bias: broadcastable to `[B, N, T, S]`.
    relative_bias: b, `[N, 2L+1]` (T5, ALiBi).
    relative_keys: a, `[2L+1, H]` (Shaw) or, per head, `[N, 2L+1, H]`
      (Transformer-XL); its L may differ.
    relative_queries: c, of these shapes (DeBERTa, equations 2 to 4).
    sinks: `[N]`, one logit per head that only adds to the sum of the softmax, or
      `[B, T, N]`.
    logits_soft_cap: c; scale · q · k becomes c · tanh(scale · q · k / c).
    log_forget: `[B, T, N]`; Σ over s < u ≤ t is added, in causal calls; it is 0
      at positions that a key mask excludes.
    score_mod: `(score, b, n, t, s) -> score`.
    mask_mod: `(b, n, t, s) -> bool`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: Attention is all you need, section 3.2.1, arXiv:1706.03762. Relative
  keys: arXiv:1803.02155; relative queries: arXiv:2006.03654.
  """
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  scale = shared.logit_scale(scale, head_dim)
  key = shared.repeat_heads(key, num_heads)
  visible = shared.visible_pairs(
    query,
    key,
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  if mask_mod is not None:
    for b, n, t in np.ndindex(batch, num_heads, length):
      s = np.arange(key.shape[1])
      visible[b, n, t] &= np.asarray(mask_mod(b, n, t, s), bool)
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  if relative_bias is None:
    relative_bias = np.zeros((num_heads, 1))
  if relative_keys is None:
    relative_keys = np.zeros((1, head_dim))
  if relative_queries is None:
    relative_queries = np.zeros((1, head_dim))
  b_table, a_table, c_table = shared.as_float64(
    relative_bias, relative_keys, relative_queries
  )
  a_table, c_table = (
    np.broadcast_to(x, (num_heads, *x.shape[-2:])) for x in (a_table, c_table)
  )
  shape = batch, visible.shape[2], num_heads
  sinks = np.broadcast_to(-np.inf if sinks is None else sinks, shape)
  cum_log_forget = np.zeros((batch, max(visible.shape[2:]), num_heads))
  if log_forget is not None:
    if not is_causal:
      raise ValueError("is_causal: expected True with log_forget, got False")
    (forget,) = shared.as_float64(log_forget)
    if mask is not None and np.shape(mask)[2] == 1:
      # A key mask, which is the same for all queries.
      forget = np.where(np.asarray(mask)[:, :, 0].swapaxes(1, 2), forget, 0.0)
    cum_log_forget = np.cumsum(forget, axis=1)

  def weights(b, n, t, s):
    logits = scale * key[b, s, n] @ query[b, t, n]
    if logits_soft_cap is not None:
      logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    logits += scale * shared.at_distance(a_table[n], s - t) @ query[b, t, n]
    key_products = shared.at_distance(c_table[n], s - t) * key[b, s, n]
    logits += scale * key_products.sum(axis=-1)
    logits += shared.at_distance(b_table[n], s - t)
    if score_mod is not None:
      logits = np.asarray(score_mod(logits, b, n, t, s), np.float64)
    logits = logits + bias[b, n, t, s]
    logits += cum_log_forget[b, t, n] - cum_log_forget[b, s, n]
    return shared.softmax(logits, sinks[b, t, n])

  return shared.weighted_values(weights, value, visible)
