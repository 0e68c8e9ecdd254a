"""Linformer."""

import numpy as np

from tests.attention.reference.common import softmax_average


def linformer_attention(
  query,
  key,
  value,
  *,
  key_projection,
  value_projection=None,
  mask=None,
  scale=None,
):
  """softmax(scale · Q (EᵀK)ᵀ) (FᵀV); E and F are `[S, R]` or `[K, S, R]`.

  Masked keys and values are zero before they are projected, and an example
  without any key gets zeros. F is E where it is None.
  """
  batch, length, num_heads, head_dim = query.shape
  source_length, num_kv_heads = key.shape[1:3]
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  if value_projection is None:
    value_projection = key_projection
  visible = np.ones((batch, source_length), bool)
  if mask is not None:
    visible &= np.asarray(mask)[:, 0, 0, :]
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n in np.ndindex(batch, num_heads):
    k = n // (num_heads // num_kv_heads)
    e, f = (
      (p[k] if p.ndim == 3 else p)[:source_length]
      for p in (key_projection, value_projection)
    )
    zeroed = visible[b][:, None]
    keys = e.T @ (key[b, :, k] * zeroed)
    values = f.T @ (value[b, :, k] * zeroed)
    for t in range(length):
      if visible[b].any():
        logits = scale * keys @ query[b, t, n]
        out[b, t, n] = softmax_average(logits, values)
  return out
