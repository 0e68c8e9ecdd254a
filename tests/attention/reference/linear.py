"""Linear attention and Performer."""

import numpy as np

from tests.attention.reference.common import repeat_heads, visible_pairs


def random_features(x, projection, kernel):
  """φ(x) `[..., M]`: exp(ω·x - |x|²/2)/√M, or relu(ω·x/√M) + 1e-3."""
  num_features = len(projection)
  products = x @ projection.T
  if kernel == "softmax":
    squares = (x**2).sum(-1, keepdims=True) / 2
    return np.exp(products - squares) / np.sqrt(num_features)
  return np.maximum(products / np.sqrt(num_features), 0) + 1e-3


def elu_plus_one(x):
  """φ(x): x + 1 above 0, e^x below."""
  return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear_attention(
  query,
  key,
  value,
  *,
  feature_map=elu_plus_one,
  mask=None,
  is_causal=False,
  scale=None,
):
  """Σ_s φ(q)·φ(k_s) v_s / Σ_s φ(q)·φ(k_s), φ of √scale · x."""
  root = 1.0 if scale is None else np.sqrt(scale)
  visible = visible_pairs(query, key, mask=mask, is_causal=is_causal)
  return _average(
    feature_map(query * root), feature_map(key * root), value, visible
  )


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
  scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale
  visible = visible_pairs(query, key, mask=mask, is_causal=is_causal)
  queries = random_features(query * np.sqrt(scale), projection, kernel)
  keys = random_features(key * np.sqrt(scale), projection, kernel)
  return _average(queries, keys, value, visible)


def _average(queries, keys, value, visible):
  """Values averaged with the products of features as weights."""
  batch, length, num_heads, _ = queries.shape
  keys, value = repeat_heads(keys, num_heads), repeat_heads(value, num_heads)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    sees = visible[b, n, t]
    if sees.any():
      weights = keys[b, sees, n] @ queries[b, t, n]
      out[b, t, n] = weights @ value[b, sees, n] / weights.sum()
  return out
