"""Additive attention."""

import numpy as np

from tests.attention.reference.common import softmax_average, visible_pairs


def additive_attention(
  query,
  key,
  value,
  *,
  query_kernel,
  key_kernel,
  score_kernel,
  scale=1.0,
  bias=None,
  **visibility,
):
  """softmax(scale · v·tanh(W q + U k) + bias) V over the visible keys."""
  batch, length, num_heads, _ = query.shape
  visible = visible_pairs(query, key, **visibility)
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    k = n // (num_heads // key.shape[2])
    sees = visible[b, n, t]
    hidden = np.tanh(
      query[b, t, n] @ query_kernel[n] + key[b, sees, k] @ key_kernel[n]
    )
    scores = scale * hidden @ score_kernel[n] + bias[b, n, t, sees]
    out[b, t, n] = softmax_average(scores, value[b, sees, k])
  return out
