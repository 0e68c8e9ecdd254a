"""Additive attention (Bahdanau et al., 2015), as the paper defines it."""

from jaxtyping import Float64
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
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  bias: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Scores from a network of one hidden layer: softmax(v·tanh(W q + U k)) V.

    e[t, s] = scale · vᵀ tanh(W q_t + U k_s) + bias[t, s]
    out[t] = Σ_s softmax_s(e[t, s]) v_s

  Args:
    query: `[B, T, N, H]`, the paper's decoder states s_{i−1}.
    key: `[B, S, K, H]`, the paper's annotations h_j; query head n reads key
      head n // (N/K).
    value: `[B, S, K, V]`, in the paper the annotations as well.
    query_kernel: W, `[N, H, A]`.
    key_kernel: U, `[N, H, A]`.
    score_kernel: v, `[N, A]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the scores; None is 1, as in the paper.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: broadcastable to `[B, N, T, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: Neural machine translation by jointly learning to align and translate,
  section A.1.2, arXiv:1409.0473.
  """
  query, key, value = shared.as_float64(query, key, value)
  W, U, v = shared.as_float64(query_kernel, key_kernel, score_kernel)
  batch, length, num_heads, _ = query.shape
  scale = 1.0 if scale is None else np.asarray(scale)
  visible = shared.visible_pairs(
    (batch, num_heads, length, key.shape[1]),
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    hidden = np.tanh(query[b, t, n] @ W[n] + key[b, s, n] @ U[n])
    scores = scale * hidden @ v[n] + bias[b, n, t, s]
    out[b, t, n] = shared.softmax(scores) @ value[b, s, n]
  return out
