"""Latent attention (DeepSeek-V2, 2024), as the paper defines it."""

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions.dense import dense_attention


def latent_attention(
  query: ArrayLike,
  latent: ArrayLike,
  *,
  key_kernel: ArrayLike,
  value_kernel: ArrayLike,
  shared_key: ArrayLike | None = None,
  value: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Dense attention to keys and values that are made of the latent numbers.

    k[s, n] = [c_s · W_K[n]; r_s]        v[s, n] = c_s · W_V[n]

  Args:
    query: `[B, T, N, H]`, H = C + P.
    latent: c, `[B, S, R]`.
    key_kernel: W_K, `[R, N, C]`.
    value_kernel: W_V, `[R, N, V]`.
    shared_key: r, `[B, S, P]`, the same for all heads; None is P = 0.
    value: `[B, S, K, V]`, in place of v; query head n reads head n // (N/K).
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: DeepSeek-V2, section 2.1, equations 9 to 19, arXiv:2405.04434.
  """
  latent = np.asarray(latent, np.float64)
  key_kernel = np.asarray(key_kernel, np.float64)
  value_kernel = np.asarray(value_kernel, np.float64)
  shape = latent.shape[:2]
  num_heads, own = key_kernel.shape[1:]
  shared = np.zeros((*shape, 0)) if shared_key is None else shared_key
  key = np.zeros((*shape, num_heads, own + np.shape(shared)[2]))
  values = np.zeros((*shape, num_heads, value_kernel.shape[2]))
  # A position that a mask hides may hold anything.
  with np.errstate(all="ignore"):
    for b, s, n in np.ndindex(*shape, num_heads):
      key[b, s, n, :own] = latent[b, s] @ key_kernel[:, n]
      key[b, s, n, own:] = np.asarray(shared, np.float64)[b, s]
      values[b, s, n] = latent[b, s] @ value_kernel[:, n]
  if value is not None:
    value = np.asarray(value, np.float64)
    values = np.repeat(value, num_heads // value.shape[2], axis=2)
  return dense_attention(
    query,
    key,
    values,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
