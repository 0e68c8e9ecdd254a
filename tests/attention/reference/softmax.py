"""Dense and windowed softmax attention."""

import numpy as np

from tests.attention.reference.common import (
  repeat_heads,
  softmax_average,
  visible_pairs,
)


def dense_attention(
  query,
  key,
  value,
  *,
  scale=None,
  bias=None,
  relative_bias=None,
  relative_keys=None,
  **visibility,
):
  """softmax(scale · Q Kᵀ + bias) V over the visible keys.

  `relative_keys` are added to the keys (Shaw), `relative_bias` to the logits.
  """
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = visible_pairs(query, key, **visibility)
  key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    sees = visible[b, n, t]
    logits = scale * key[b, sees, n] @ query[b, t, n] + bias[b, n, t, sees]
    for i, s in enumerate(np.flatnonzero(sees)):
      logits[i] += by_distance(
        s - t, query[b, t, n], n, scale, relative_bias, relative_keys
      )
    out[b, t, n] = softmax_average(logits, value[b, sees, n])
  return out


def by_distance(distance, query, head, scale, relative_bias, relative_keys):
  """What tables of 2L+1 entries, for -L … L, add to one logit."""
  added = 0.0
  if relative_bias is not None:
    longest = (relative_bias.shape[1] - 1) // 2
    clipped = min(max(distance, -longest), longest)
    added += relative_bias[head, longest + clipped]
  if relative_keys is not None:
    longest = (relative_keys.shape[0] - 1) // 2
    clipped = min(max(distance, -longest), longest)
    added += scale * relative_keys[longest + clipped] @ query
  return added


def in_window(length, source_length, window, dilation, num_heads):
  """`[N, T, S]`: key s = t + dilation · j with -left ≤ j ≤ right."""
  left, right = (window, window) if isinstance(window, int) else window
  dilation = np.broadcast_to(dilation, num_heads)
  inside = np.zeros((num_heads, length, source_length), bool)
  for n, t in np.ndindex(num_heads, length):
    for j in range(-left, right + 1):
      if 0 <= t + dilation[n] * j < source_length:
        inside[n, t, t + dilation[n] * j] = True
  return inside


def sliding_window_attention(
  query,
  key,
  value,
  *,
  window,
  dilation=1,
  scale=None,
  global_indices=None,
  global_qkv=None,
  relative_bias=None,
  relative_keys=None,
  **visibility,
):
  """One softmax over the keys in the window and the global keys (a union).

  A global query sees every key, through `global_qkv` where that is given. An
  index of -1 is no token, and an index given twice is one token.
  """
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = visible_pairs(query, key, **visibility)
  inside = in_window(length, key.shape[1], window, dilation, num_heads)
  local = query, key, value
  projections = {
    is_global: (
      q,
      repeat_heads(k, num_heads),
      repeat_heads(v, num_heads),
    )
    for is_global, (q, k, v) in (
      (False, local),
      (True, local if global_qkv is None else global_qkv),
    )
  }
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    tokens = [] if global_indices is None else list(global_indices[b])
    is_global = t in tokens
    reach = inside[n, t] | is_global
    for s in tokens:
      if s >= 0:
        reach[s] = True
    sees = visible[b, n, t] & reach
    q, k, v = projections[is_global]
    logits = scale * k[b, sees, n] @ q[b, t, n]
    spacing = np.broadcast_to(dilation, num_heads)[n]
    for i, s in enumerate(np.flatnonzero(sees)):
      logits[i] += by_distance(
        (s - t) // spacing, q[b, t, n], n, scale, relative_bias, relative_keys
      )
    out[b, t, n] = softmax_average(logits, v[b, sees, n])
  return out


def multiplicative_attention(
  query, key, value, *, kernel=None, scale=None, **options
):
  """softmax(scale · q W k), scale 1 unless it is given."""
  if kernel is not None:
    turned = np.empty_like(query)
    for b, t, n in np.ndindex(query.shape[:3]):
      turned[b, t, n] = query[b, t, n] @ kernel[n]
    query = turned
  scale = 1.0 if scale is None else scale
  return dense_attention(query, key, value, scale=scale, **options)
