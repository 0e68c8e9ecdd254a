"""Native sparse attention by definition."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.shared import Result


def nsa_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  branch_gates: ArrayLike,
  key_weights: ArrayLike,
  value_weights: ArrayLike,
  stride: int = 16,
  block_size: int = 64,
  num_blocks: int = 16,
  window: int = 512,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
) -> Result:
  """Attention to compressed, selected and near keys, each with its own gate.

  Paper: arXiv:2502.11089, equations 5 to 11.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value, g = shared.as_float64(query, key, value, branch_gates)
  w, u = shared.as_float64(key_weights, value_weights)
  batch, length, num_heads, head_dim = query.shape
  kv_heads, size = w.shape
  per_key_head = num_heads // kv_heads
  keep = shared.visible_tokens(mask, batch, length)
  key, value = (shared.zero_masked(x, keep) for x in (key, value))
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, k, t in np.ndindex(batch, kv_heads, length):
    heads = slice(k * per_key_head, (k + 1) * per_key_head)
    q, keys, values = query[b, t, heads], key[b, :, k], value[b, :, k]
    starts = [
      s for s in range(0, t + 2 - size, stride) if keep[b, s : s + size].any()
    ]
    importance = np.zeros(t // block_size + 1)
    if starts:
      keys_c = np.array([w[k] @ keys[s : s + size] for s in starts])
      values_c = np.array([u[k] @ values[s : s + size] for s in starts])
      p = shared.softmax(scale * q @ keys_c.T)
      out[b, t, heads] += g[b, t, heads, :1] * (p @ values_c)
      for s, weight in zip(starts, p.sum(axis=0), strict=True):
        for unit in range(s, s + size, stride):
          if unit // block_size < len(importance):
            importance[unit // block_size] += weight
    fixed = [0, len(importance) - 1, max(len(importance) - 2, 0)]
    importance[fixed] = np.inf
    blocks = np.argsort(-importance, kind="stable")[:num_blocks]
    position = np.arange(t + 1)
    for i, visible in (
      (1, np.isin(position // block_size, blocks)),
      (2, position > t - window),
    ):
      s = np.flatnonzero(visible & keep[b, : t + 1])
      p = shared.softmax(scale * q @ keys[s].T)
      out[b, t, heads] += g[b, t, heads, i : i + 1] * (p @ values[s])
  return shared.zero_masked(out, keep)
