"""Dense softmax attention (Vaswani et al., 2017), as the paper defines it."""

from collections.abc import Callable

from jaxtyping import Float64
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
  sinks: ArrayLike | None = None,
  logits_soft_cap: float | None = None,
  log_forget: ArrayLike | None = None,
  score_mod: Callable[..., ArrayLike] | None = None,
  mask_mod: Callable[..., ArrayLike] | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every query attends to every visible key: softmax(scale · Q Kᵀ + bias) V.

    logit[t, s] = cap(scale · q_t · k_s) + scale · q_t · a[i] + bias[t, s] + b[i]
                  + Σ_{s<u≤t} log f_u
    out[t] = Σ_s softmax_s(logit[t, s]) v_s            i = clip(s − t, −L, L)

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: broadcastable to `[B, N, T, S]`.
    relative_bias: b, `[N, 2L+1]` (T5, ALiBi).
    relative_keys: a, `[2L+1, H]` (Shaw) or, one for each head, `[N, 2L+1, H]`
      (Transformer-XL); its L may be another.
    sinks: `[N]`, a logit for each head in the sum of the softmax alone.
    logits_soft_cap: c; scale · q · k becomes c · tanh(scale · q · k / c).
    log_forget: `[B, T, N]`; Σ over s < u ≤ t is added, in causal calls;
      positions that a mask of one row hides forget nothing.
    score_mod: `(score, b, n, t, s) -> score`.
    mask_mod: `(b, n, t, s) -> bool`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: Attention is all you need, section 3.2.1, arXiv:1706.03762. Relative
  keys: Self-attention with relative position representations,
  arXiv:1803.02155.
  """
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  scale = shared.logit_scale(scale, head_dim)
  visible = shared.visible_pairs(
    (batch, num_heads, length, key.shape[1]),
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  relative_bias, relative_keys = shared.relative_tables(
    relative_bias, relative_keys, num_heads, head_dim
  )
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  sinks = np.broadcast_to(-np.inf if sinks is None else sinks, num_heads)
  forgotten = np.zeros((batch, length, num_heads))
  if log_forget is not None:
    if not is_causal:
      raise ValueError("is_causal: expected True with log_forget, got False")
    log_forget = shared.forget_of_visible(log_forget, mask)
    forgotten = np.cumsum(log_forget, axis=1)
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    s = s[shared.shown(mask_mod, b, n, t, s)]
    logits = scale * key[b, s, n] @ query[b, t, n]
    logits = shared.capped(logits, logits_soft_cap)
    distant = shared.at_distance(relative_keys[n], s - t)
    logits += scale * distant @ query[b, t, n]
    logits += shared.at_distance(relative_bias[n], s - t)
    if score_mod is not None:
      logits = np.asarray(score_mod(logits, b, n, t, s), np.float64)
    logits = logits + bias[b, n, t, s]
    if log_forget is not None:
      logits += forgotten[b, t, n] - forgotten[b, s, n]
    out[b, t, n] = shared.softmax(logits, sinks[n]) @ value[b, s, n]
  return out
