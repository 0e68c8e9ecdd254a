"""Performer (Choromanski et al., 2020), as the paper defines it."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def log_random_features(
  x: ArrayLike, projection: ArrayLike, kernel: str
) -> np.ndarray:
  """Log φ(x), from `[..., H]` to `[..., M]`, where ω_m are the rows of `projection`.

  'softmax'  φ_m(x) = exp(ω_m·x − |x|²/2) / √M
  'relu'     φ_m(x) = max(ω_m·x / √M, 0) + 0.001
  """
  x, projection = shared.as_float64(x, projection)
  num_features = len(projection)
  products = x @ projection.T
  if kernel == "softmax":
    squares = (x**2).sum(-1, keepdims=True)
    return products - squares / 2 - np.log(num_features) / 2
  return np.log(np.maximum(products / np.sqrt(num_features), 0) + 0.001)


def performer_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  projection: ArrayLike,
  kernel: Literal["softmax", "relu"] = "softmax",
  scale: float | ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Softmax attention with exponentials estimated by random features.

    exp(scale · q·k) ≈ Σ_m φ_m(q̃) φ_m(k̃)                     x̃ = √scale · x
    out[t] = Σ_s φ(q̃_t)·φ(k̃_s) v_s / Σ_s φ(q̃_t)·φ(k̃_s)

  over the visible s, with the φ of `log_random_features`.

  Args:
    projection: `[M, H]`, with rows ω_m.
    kernel: 'softmax', or 'relu', a different kernel that does not approximate
      softmax.
    scale: factor of the estimated logits; None is 1/√H.
    **options: mask and is_causal as in `dense_attention`.

  Paper: Rethinking attention with Performers, section 2, arXiv:2009.14794.
  """
  query, key, value = shared.as_float64(query, key, value)
  root = np.sqrt(shared.logit_scale(scale, query.shape[3]))
  visible = shared.visible_pairs(query, key, **options)
  # Features of masked keys are also computed, so NaN must be removed.
  key = shared.zero_masked(key, np.any(visible, axis=(1, 2)))
  log_queries = log_random_features(root * query, projection, kernel)
  log_keys = log_random_features(root * key, projection, kernel)
  log_keys = shared.repeat_heads(log_keys, query.shape[2])

  def weights(b, n, t, s):
    # φ_m(q_t) φ_m(k_s) for all s and m. A joint softmax over both divides by their
    # sum, the normaliser, and stays in the range of floats.
    log_products = log_queries[b, t, n] + log_keys[b, s, n]
    products = shared.softmax(log_products.ravel()).reshape(log_products.shape)
    return products.sum(-1)

  return shared.weighted_values(weights, value, visible)
