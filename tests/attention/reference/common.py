"""What the naive references share: who sees whom, and one softmax."""

import numpy as np


def repeat_heads(array, num_heads):
  """Gives every query head n its own copy of key/value head n // (N/K)."""
  return np.repeat(array, num_heads // array.shape[2], axis=2)


def visible_pairs(
  query,
  key,
  *,
  mask=None,
  is_causal=False,
  query_segment_ids=None,
  key_segment_ids=None,
):
  """`[B, N, T, S]`: which query may see which key, whatever the mechanism."""
  batch, length, num_heads, _ = query.shape
  visible = np.ones((batch, num_heads, length, key.shape[1]), bool)
  if mask is not None:
    visible &= np.asarray(mask)
  if is_causal:
    visible &= np.tri(length, key.shape[1], dtype=bool)
  if query_segment_ids is not None:
    same = query_segment_ids[:, :, None] == key_segment_ids[:, None, :]
    visible &= same[:, None]
  return visible


def softmax_average(logits, values):
  """softmax(logits) · values; zeros where there is nothing to attend to."""
  if not len(logits):
    return np.zeros(values.shape[-1])
  weights = np.exp(logits - logits.max())
  return weights @ values / weights.sum()
