"""Mixture of block attention by definition."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.shared import Result


def moba_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  block_size: int,
  top_k: int,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
) -> Result:
  """A query attends to its own block and to the top_k − 1 best earlier blocks.

  The score of a block is the product of the query with the mean of its keys, without
  masked keys. Of equal blocks the earlier one is taken. Paper: arXiv:2502.13189,
  section 2.2.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  kept = shared.visible_tokens(mask, batch, length)
  keys = shared.repeat_heads(shared.zero_hidden(key, kept), num_heads)
  visible = np.zeros((batch, num_heads, length, length), bool)
  for b, n, t in np.ndindex(batch, num_heads, length):
    own = t // block_size
    scores = {}
    for m in range(own):
      block = slice(m * block_size, (m + 1) * block_size)
      if kept[b, block].any():
        mean = keys[b, block, n][kept[b, block]].mean(axis=0)
        scores[m] = query[b, t, n] @ mean
    best = sorted(scores, key=lambda m: (-scores[m], m))[: top_k - 1]
    for m in (own, *best):
      visible[b, n, t, m * block_size : (m + 1) * block_size] = True
  visible &= np.tri(length, dtype=bool) & kept[:, None, None]
  scale = shared.logit_scale(scale, head_dim)
  value = shared.zero_hidden(value, kept)
  return shared.weighted_values(
    lambda b, n, t, s: shared.softmax(scale * keys[b, s, n] @ query[b, t, n]),
    value,
    visible,
  )
