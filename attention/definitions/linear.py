"""Linear attention (Katharopoulos et al., 2020), as the paper defines it."""

from collections.abc import Callable

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def elu_plus_one(x: np.ndarray) -> np.ndarray:
  """elu(x) + 1: x + 1 above 0, e^x below; the paper's feature map."""
  return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def hedgehog_features(x: np.ndarray) -> np.ndarray:
  """[softmax(x), softmax(−x)], Hedgehog's map of an x that is projected."""
  return np.concatenate([shared.softmax(x), shared.softmax(-x)], axis=-1)


def linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  feature_map: Callable[[np.ndarray], ArrayLike] = elu_plus_one,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Attention whose weights are products of features.

    out[t] = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)        over the visible s

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    feature_map: φ, from `[..., H]` to `[..., M]`, nothing below 0.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: None is φ(x), as in the paper; else φ(√scale · x).

  Returns:
    `[B, T, N, V]` float64; zeros for a query whose products are all 0, or that
    sees no key.

  Paper: Transformers are RNNs, equations 5 and 9, arXiv:2006.16236.
  """
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, _ = query.shape
  root = 1.0 if scale is None else np.sqrt(np.asarray(scale))
  visible = shared.visible_pairs(
    (batch, num_heads, length, key.shape[1]), mask=mask, is_causal=is_causal
  )
  # Features are computed ahead of the loop, where an inf would be read.
  is_seen = np.any(visible, axis=(1, 2))
  key = np.where(is_seen[:, :, None, None], key, 0.0)
  queries, keys = shared.as_float64(
    feature_map(root * query), feature_map(root * key)
  )
  keys = shared.repeat_heads(keys, num_heads)
  value = shared.repeat_heads(value, num_heads)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    weights = keys[b, s, n] @ queries[b, t, n]
    total = weights.sum()
    if total != 0:
      out[b, t, n] = weights @ value[b, s, n] / total
  return out
