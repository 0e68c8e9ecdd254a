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
  index_query: ArrayLike | None = None,
  index_key: ArrayLike | None = None,
  local_blocks: int = 1,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
) -> Result:
  """A query attends to its own block and to the top_k − 1 best earlier blocks.

  The score of a block is the product of the query and the mean of its unmasked keys. Of
  several equal scores, the first is selected. Paper: arXiv:2502.13189, section 2.2.

  With index arrays, as in the code of MiniMax-M3, the score of a block is the largest
  product of the index query and an earlier index key of the block. The nearest
  `local_blocks` are selected first, and blocks consist of unmasked positions.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  keep = shared.visible_tokens(mask, batch, length)
  keys = shared.repeat_heads(shared.zero_masked(key, keep), num_heads)
  if index_query is None or index_key is None:
    visible = _mean_selection(query, keys, keep, block_size, top_k)
  else:
    a, b = shared.as_float64(index_query, index_key)
    visible = _index_selection(a, b, keep, block_size, top_k, local_blocks)
    visible = np.repeat(visible, num_heads // visible.shape[1], axis=1)
  visible &= np.tri(length, dtype=bool) & keep[:, None, None]
  scale = shared.logit_scale(scale, head_dim)
  value = shared.zero_masked(value, keep)
  return shared.weighted_values(
    lambda b, n, t, s: shared.softmax(scale * keys[b, s, n] @ query[b, t, n]),
    value,
    visible,
  )


def _mean_selection(query, keys, keep, block_size, top_k):
  batch, length, num_heads, _ = query.shape
  visible = np.zeros((batch, num_heads, length, length), bool)
  for b, n, t in np.ndindex(batch, num_heads, length):
    own = t // block_size
    scores = {}
    for m in range(own):
      block = slice(m * block_size, (m + 1) * block_size)
      if keep[b, block].any():
        mean = keys[b, block, n][keep[b, block]].mean(axis=0)
        scores[m] = query[b, t, n] @ mean
    best = sorted(scores, key=lambda m: (-scores[m], m))[: top_k - 1]
    for m in (own, *best):
      visible[b, n, t, m * block_size : (m + 1) * block_size] = True
  return visible


def _index_selection(query, key, keep, block_size, top_k, local_blocks):
  batch, length, heads, _ = query.shape
  visible = np.zeros((batch, heads, length, length), bool)
  for b, i, t in np.ndindex(batch, heads, length):
    # The unmasked positions up to t, divided into blocks.
    positions = np.flatnonzero(keep[b, : t + 1])
    blocks = [
      positions[j : j + block_size]
      for j in range(0, len(positions), block_size)
    ]
    scores = [np.max(key[b, x] @ query[b, t, i]) for x in blocks]
    count = min(local_blocks, len(scores))
    scores[len(scores) - count :] = [np.inf] * count
    order = sorted(range(len(scores)), key=lambda m: (-scores[m], m))
    for m in order[:top_k]:
      visible[b, i, t, blocks[m]] = True
  return visible
