"""PaTH attention (Yang et al., 2025), as the paper defines it."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def path_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  householder: ArrayLike,
  beta: ArrayLike,
  log_forget: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> shared.Result:
  """Softmax attention to keys transformed by the products of all later reflections H.

    score_ts = scale · q_tᵀ H_t H_{t−1} ⋯ H_{s+1} k_s + Σ_{s<u≤t} log f_u
    out_t = Σ_{s≤t} softmax_s(score_ts) v_s              H_j = I − β_j w_j w_jᵀ

  Args:
    query: as in `dense_attention`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    householder: w, `[B, T, K, H]`.
    beta: β, `[B, T, K]`.
    log_forget: log f, `[B, T, N]`; None is 0.
    mask: key mask `[B, 1, 1, T]`; masked positions have H = I and log f = 0.
    is_causal: must be True.
    scale: None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, T]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: arXiv:2505.16381, sections 3.1 and 3.3.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  if log_forget is None:
    log_forget = np.zeros(np.shape(query)[:3])
  arrays = shared.as_float64(query, key, value, householder, beta, log_forget)
  batch, length, num_heads, head_dim = arrays[0].shape
  keep = shared.visible_tokens(mask, batch, length)
  # Masked positions may have any content.
  query, (key, value, w, rate, forget) = (
    arrays[0],
    (shared.zero_masked(x, keep) for x in arrays[1:]),
  )
  key, w, rate = (shared.repeat_heads(x, num_heads) for x in (key, w, rate))
  scores = np.zeros((batch, num_heads, length, length))
  for b, n in np.ndindex(batch, num_heads):
    keys, sums = np.array(key[b, :, n]), np.zeros(length)
    for t in range(length):
      direction = w[b, t, n]
      keys[:t] -= rate[b, t, n] * np.outer(keys[:t] @ direction, direction)
      sums[:t] += forget[b, t, n]
      scores[b, n, t] = keys @ query[b, t, n]
      scores[b, n, t] = (
        shared.logit_scale(scale, head_dim) * scores[b, n, t] + sums
      )
  visible = shared.visible_pairs(
    query,
    key,
    mask=mask,
    is_causal=True,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  return shared.weighted_values(
    lambda b, n, t, s: shared.softmax(scores[b, n, t, s]), value, visible
  )
