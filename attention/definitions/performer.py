"""Performer (Choromanski et al., 2021), as the paper defines it."""

from typing import Literal

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def random_features(
  x: ArrayLike, projection: ArrayLike, kernel: str
) -> np.ndarray:
  """φ(x), from `[..., H]` to `[..., M]`, with ω_m the rows of `projection`.

  'softmax'  φ_m(x) = exp(ω_m·x − |x|²/2) / √M
  'relu'     φ_m(x) = max(ω_m·x / √M, 0) + 0.001
  """
  return np.exp(_log_random_features(x, projection, kernel))


def _log_random_features(
  x: ArrayLike, projection: ArrayLike, kernel: str
) -> np.ndarray:
  """Log φ(x), which is in the range of floats for every x."""
  x, projection = shared.as_float64(x, projection)
  num_features = len(projection)
  products = x @ projection.T
  if kernel == "softmax":
    squares = (x**2).sum(-1, keepdims=True)
    return products - squares / 2 - np.log(num_features) / 2
  if kernel == "relu":
    return np.log(np.maximum(products / np.sqrt(num_features), 0) + 0.001)
  raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")


def performer_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  projection: ArrayLike,
  kernel: Literal["softmax", "relu"] = "softmax",
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Softmax attention whose exponentials are estimated by random features.

    exp(scale · q·k) ≈ Σ_m φ_m(q̃) φ_m(k̃)                     x̃ = √scale · x
    out[t] = Σ_s φ(q̃_t)·φ(k̃_s) v_s / Σ_s φ(q̃_t)·φ(k̃_s)

  over the visible s, with the φ of `random_features`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    projection: `[M, H]`, rows ω_m.
    kernel: 'softmax', or 'relu', which is a kernel of its own and no estimate
      of softmax.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: of the estimated logits; None is 1/√H.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: an unknown kernel.

  Paper: Rethinking attention with Performers, sections 2.2 to 2.4,
  arXiv:2009.14794.
  """
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  root = np.sqrt(shared.logit_scale(scale, head_dim))
  visible = shared.visible_pairs(
    (batch, num_heads, length, key.shape[1]), mask=mask, is_causal=is_causal
  )
  # Features are computed ahead of the loop, where an inf would be read.
  is_seen = np.any(visible, axis=(1, 2))
  key = np.where(is_seen[:, :, None, None], key, 0.0)
  log_queries = _log_random_features(root * query, projection, kernel)
  log_keys = _log_random_features(root * key, projection, kernel)
  log_keys = shared.repeat_heads(log_keys, num_heads)
  value = shared.repeat_heads(value, num_heads)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    # φ_m(q_t) φ_m(k_s) for all s and m. The softmax over both together divides
    # by their sum, the normaliser, and does not leave the range of floats.
    log_products = log_queries[b, t, n] + log_keys[b, s, n]
    weights = shared.softmax(log_products.ravel()).reshape(log_products.shape)
    out[b, t, n] = weights.sum(-1) @ value[b, s, n]
  return out
