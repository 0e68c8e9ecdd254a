"""Attention over near, global and random blocks."""

import numpy as np

from tests.attention.reference.common import (
  repeat_heads,
  softmax_average,
  visible_pairs,
)


def attended_blocks(length, block_size, random_blocks):
  """`[N, T, S]`: is the key's block one that the query's block attends to."""
  num_heads = random_blocks.shape[0]
  last = (length - 1) // block_size
  attended = np.zeros((num_heads, length, length), bool)
  for n, t in np.ndindex(num_heads, length):
    i = t // block_size
    blocks = {0, last, i - 1, i, i + 1}
    if i in (0, last):
      blocks |= set(range(last + 1))
    else:
      blocks |= set(np.asarray(random_blocks[n, i - 1]).tolist())
    for j in blocks & set(range(last + 1)):
      attended[n, t, j * block_size : (j + 1) * block_size] = True
  return attended


def bigbird_attention(
  query,
  key,
  value,
  *,
  block_size,
  random_blocks,
  scale=None,
  **visibility,
):
  """One softmax over the union of the blocks that a query attends to."""
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = visible_pairs(query, key, **visibility)
  visible &= attended_blocks(length, block_size, random_blocks)
  key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    sees = visible[b, n, t]
    logits = scale * key[b, sees, n] @ query[b, t, n]
    out[b, t, n] = softmax_average(logits, value[b, sees, n])
  return out
