"""Additive attention (Bahdanau et al., 2014), as the paper defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def additive_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  query_kernel: ArrayLike,
  key_kernel: ArrayLike,
  score_kernel: ArrayLike,
  scale: float | ArrayLike | None = None,
  bias: ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Attention scores from a network with one hidden layer: softmax(v·tanh(W q + U k))
  V.

    e[t, s] = scale · vᵀ tanh(W q_t + U k_s) + bias[t, s]
    out[t] = Σ_s softmax_s(e[t, s]) v_s

  Args:
    query_kernel: W, `[N, H, A]`.
    key_kernel: U, `[N, H, A]`.
    score_kernel: v, `[N, A]`.
    scale: factor of the scores; None is 1, as in the paper.
    bias: broadcastable to `[B, N, T, S]`.
    **options: mask, is_causal and segment ids as in `dense_attention`.

  Paper: arXiv:1409.0473, section A.1.2.
  """
  query, key, value = shared.as_float64(query, key, value)
  W, U, v = shared.as_float64(query_kernel, key_kernel, score_kernel)
  scale = 1.0 if scale is None else np.asarray(scale)
  key = shared.repeat_heads(key, query.shape[2])
  visible = shared.visible_pairs(query, key, **options)
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)

  def weights(b, n, t, s):
    hidden = np.tanh(query[b, t, n] @ W[n] + key[b, s, n] @ U[n])
    scores = scale * hidden @ v[n] + bias[b, n, t, s]
    return shared.softmax(scores)

  return shared.weighted_values(weights, value, visible)
