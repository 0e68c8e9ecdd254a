"""Window and linear attention under one normaliser, as LoLCATs defines it."""

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.linear import hedgehog_features


def window_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  query_kernel: ArrayLike,
  key_kernel: ArrayLike,
  mix: ArrayLike,
  window: int,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Exponentials for the last W keys, products of features for those before.

    out[t] = Σ_s a[t, s] v_s / Σ_s a[t, s]
    a[t, s] = γ exp(scale · q_t·k_s − m_t)                     t − W < s ≤ t
    a[t, s] = φ(q_t W_q)·φ(k_s W_k)                            s ≤ t − W
    m_t = max of scale · q_t·k_s over the visible s > t − W    γ = sigmoid(mix)

  with the φ of `hedgehog_features`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    query_kernel: W_q, `[N, H, H]`.
    key_kernel: W_k, `[K, H, H]`.
    mix: `[N]`, the logit of γ.
    window: W, the number of near keys, that of the query included.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: True; the mechanism is causal.
    scale: factor of the near logits; None is 1/√H.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: `is_causal` is False.

  Paper: LoLCATs, section 3.2, arXiv:2410.10254.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value = shared.as_float64(query, key, value)
  W_q, W_k, mix = shared.as_float64(query_kernel, key_kernel, mix)
  batch, length, num_heads, head_dim = query.shape
  scale = shared.logit_scale(scale, head_dim)
  visible = shared.visible_pairs(
    (batch, num_heads, length, key.shape[1]), mask=mask, is_causal=True
  )
  gamma = 1 / (1 + np.exp(-mix))
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)
  W_k = np.repeat(W_k, num_heads // len(W_k), axis=0)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    near, far = s[s > t - window], s[s <= t - window]
    logits = scale * key[b, near, n] @ query[b, t, n]
    m = logits.max(initial=-np.inf)
    phi_q = hedgehog_features(query[b, t, n] @ W_q[n])
    phi_k = hedgehog_features(key[b, far, n] @ W_k[n])
    a = np.concatenate([gamma[n] * np.exp(logits - m), phi_k @ phi_q])
    values = value[b, np.concatenate([near, far]), n]
    if a.sum() != 0:
      out[b, t, n] = a @ values / a.sum()
  return out
