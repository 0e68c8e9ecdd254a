"""Linear attention (Katharopoulos et al., 2020), as the paper defines it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def elu_plus_one(x: np.ndarray) -> np.ndarray:
  """elu(x) + 1: x + 1 above 0, e^x below; the paper's feature map."""
  return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def hedgehog_features(x: np.ndarray) -> np.ndarray:
  """[softmax(x), softmax(−x)], Hedgehog's map of a projected x."""
  return np.concatenate([shared.softmax(x), shared.softmax(-x)], axis=-1)


def taylor_features(x: np.ndarray) -> np.ndarray:
  """[1, y, y ⊗ y / √2] with y = x / H^¼, Based's map: arXiv:2402.18668, section 3.1."""
  y = np.asarray(x, np.float64) / x.shape[-1] ** 0.25
  products = (y[..., :, None] * y[..., None, :]).reshape(*y.shape[:-1], -1)
  return np.concatenate([np.ones_like(y[..., :1]), y, products / 2**0.5], -1)


def linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  feature_map: Callable[[np.ndarray], ArrayLike] = elu_plus_one,
  scale: float | ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Attention whose weights are products of features.

    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)        over the visible s

  Args:
    feature_map: φ with φ(q)·φ(k) ≥ 0, from `[..., H]` to `[..., M]`.
    scale: None means φ(x), as in the paper; a number means φ(√scale · x).
    **options: mask and is_causal as in `dense_attention`.

  Paper: Transformers are RNNs, equations 5 and 9, arXiv:2006.16236.
  """
  query, key, value = shared.as_float64(query, key, value)
  root = 1.0 if scale is None else np.sqrt(np.asarray(scale))
  visible = shared.visible_pairs(query, key, **options)
  # Features of masked keys are also computed, so NaN must be removed.
  key = shared.zero_masked(key, np.any(visible, axis=(1, 2)))
  queries, keys = shared.as_float64(
    feature_map(root * query), feature_map(root * key)
  )
  keys = shared.repeat_heads(keys, query.shape[2])

  def weights(b, n, t, s):
    products = keys[b, s, n] @ queries[b, t, n]
    return products / (products.sum() or 1.0)

  return shared.weighted_values(weights, value, visible)
