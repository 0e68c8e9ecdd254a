"""Stick-breaking attention (Tan et al., 2024), as the paper defines it."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def stick_breaking_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  attend_current: bool = False,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> shared.Result:
  """Each key takes a share of the remaining weight, from the nearest to the farthest.

    β_ts = σ(scale · q_t · k_s)
    out_t = Σ_{s<t} A_ts v_s        A_ts = β_ts · Π_{s<j<t} (1 − β_tj)

  Args:
    query: as in `dense_attention`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    attend_current: whether the key at the query's own position is included, s ≤ t.
    mask: key mask `[B, 1, 1, T]`; masked keys take no weight.
    is_causal: must be True.
    scale: None is 1/√H.
    query_segment_ids: `[B, T]`; keys of another segment take no weight.
    key_segment_ids: `[B, T]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: arXiv:2410.17980, equations 1 and 2.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value = shared.as_float64(query, key, value)
  num_heads, head_dim = query.shape[2:]
  scale = shared.logit_scale(scale, head_dim)
  key = shared.repeat_heads(key, num_heads)
  visible = shared.visible_pairs(
    query,
    key,
    mask=mask,
    is_causal=True,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  if not attend_current:
    visible &= ~np.eye(query.shape[1], dtype=bool)

  def weights(b, n, t, s):
    logits = scale * key[b, s, n] @ query[b, t, n]
    beta = np.exp(-np.logaddexp(0.0, -logits))
    # 1 − β, accurate even if β rounds to 1.
    one_minus_beta = np.exp(-np.logaddexp(0.0, logits))
    remaining, result = 1.0, np.zeros(len(s))
    for i in reversed(range(len(s))):
      result[i] = remaining * beta[i]
      remaining *= one_minus_beta[i]
    return result

  return shared.weighted_values(weights, value, visible)
