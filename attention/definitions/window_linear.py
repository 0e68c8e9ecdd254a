"""Window and linear attention with one normaliser, as LoLCATs defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.linear import hedgehog_features


def window_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  query_kernel: ArrayLike,
  key_kernel: ArrayLike,
  mix: ArrayLike,
  window: int,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Exponentials for the last W keys, products of features for earlier keys.

    out[t] = Σ_s a[t, s] v_s / Σ_s a[t, s]
    a[t, s] = γ exp(scale · q_t·k_s − m_t)                     t − W < s ≤ t
    a[t, s] = φ(q_t W_q)·φ(k_s W_k)                            s ≤ t − W
    m_t = max of scale · q_t·k_s over the visible s > t − W    γ = sigmoid(mix)

  with the φ of `hedgehog_features`.

  Args:
    query_kernel: W_q, `[N, H, H]`.
    key_kernel: W_k, `[K, H, H]`.
    mix: `[N]`, the logit of γ.
    window: W, the number of near keys, including the query's own position.
    is_causal: must be True.
    scale: factor of the near logits; None is 1/√H.
    **options: mask as in `dense_attention`.

  Paper: LoLCATs, section 3.2, arXiv:2410.10254.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value = shared.as_float64(query, key, value)
  W_q, W_k, mix = shared.as_float64(query_kernel, key_kernel, mix)
  num_heads, head_dim = query.shape[2:]
  scale = shared.logit_scale(scale, head_dim)
  visible = shared.visible_pairs(query, key, is_causal=True, **options)
  gamma = 1 / (1 + np.exp(-mix))
  key = shared.repeat_heads(key, num_heads)
  W_k = np.repeat(W_k, num_heads // len(W_k), axis=0)

  def weights(b, n, t, s):
    far, near = s[s <= t - window], s[s > t - window]
    phi_q = hedgehog_features(query[b, t, n] @ W_q[n])
    phi_k = hedgehog_features(key[b, far, n] @ W_k[n])
    logits = scale * key[b, near, n] @ query[b, t, n]
    m = logits.max(initial=-np.inf)
    a = np.concatenate([phi_k @ phi_q, gamma[n] * np.exp(logits - m)])
    return a / (a.sum() or 1.0)

  return shared.weighted_values(weights, value, visible)
