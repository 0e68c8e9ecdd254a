"""Naive float64 references of every mechanism, from the formulas alone.

Each is a loop over examples, heads and queries in NumPy, as slow as it is
plain. They share nothing with the implementations and are the only thing that
the contract suite compares numbers with.
"""

import numpy as np


def _repeat_heads(array, num_heads):
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


def _softmax_average(logits, values):
  """softmax(logits) · values; zeros where there is nothing to attend to."""
  if not len(logits):
    return np.zeros(values.shape[-1])
  weights = np.exp(logits - logits.max())
  return weights @ values / weights.sum()


def dense_attention(query, key, value, *, scale=None, bias=None, **visibility):
  """softmax(scale · Q Kᵀ + bias) V over the visible keys."""
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = visible_pairs(query, key, **visibility)
  key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
  bias = np.broadcast_to(0.0 if bias is None else bias, visible.shape)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    sees = visible[b, n, t]
    logits = scale * key[b, sees, n] @ query[b, t, n] + bias[b, n, t, sees]
    out[b, t, n] = _softmax_average(logits, value[b, sees, n])
  return out


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
      _repeat_heads(k, num_heads),
      _repeat_heads(v, num_heads),
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
    out[b, t, n] = _softmax_average(logits, v[b, sees, n])
  return out


def random_features(x, projection, kernel):
  """φ(x) `[..., M]`: exp(ω·x - |x|²/2)/√M, or relu(ω·x/√M) + 1e-3."""
  num_features = len(projection)
  products = x @ projection.T
  if kernel == "softmax":
    squares = (x**2).sum(-1, keepdims=True) / 2
    return np.exp(products - squares) / np.sqrt(num_features)
  return np.maximum(products / np.sqrt(num_features), 0) + 1e-3


def performer_attention(
  query,
  key,
  value,
  *,
  projection,
  kernel="softmax",
  mask=None,
  is_causal=False,
  scale=None,
):
  """Σ_s φ(q)·φ(k_s) v_s / Σ_s φ(q)·φ(k_s) over the visible keys."""
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = visible_pairs(query, key, mask=mask, is_causal=is_causal)
  key, value = _repeat_heads(key, num_heads), _repeat_heads(value, num_heads)
  queries = random_features(query * np.sqrt(scale), projection, kernel)
  keys = random_features(key * np.sqrt(scale), projection, kernel)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    sees = visible[b, n, t]
    if sees.any():
      weights = keys[b, sees, n] @ queries[b, t, n]
      out[b, t, n] = weights @ value[b, sees, n] / weights.sum()
  return out


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
        out[b, t, n] = _softmax_average(logits, values)
  return out
