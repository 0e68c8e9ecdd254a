"""Latent attention (DeepSeek-V2, 2024), as the paper defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def latent_attention(
  query: ArrayLike,
  latent: ArrayLike,
  *,
  key_kernel: ArrayLike,
  value_kernel: ArrayLike,
  shared_key: ArrayLike | None = None,
  value: ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Dense attention to keys and values that are projected from latent vectors.

    k[s, n] = [c_s · W_K[n]; r_s]        v[s, n] = c_s · W_V[n]

  Args:
    query: `[B, T, N, H]`, H = C + P.
    latent: c, `[B, S, R]`.
    key_kernel: W_K, `[R, N, C]`.
    value_kernel: W_V, `[R, N, V]`.
    shared_key: r, `[B, S, P]`, the same for all heads; None is P = 0.
    value: `[B, S, K, V]`, replaces v; query head n uses head n // (N/K).
    **options: as `dense_attention`.

  Paper: DeepSeek-V2, section 2.1, equations 9 to 19, arXiv:2405.04434.
  """
  c, W_K, W_V = shared.as_float64(latent, key_kernel, value_kernel)
  r = np.zeros((*c.shape[:2], 0)) if shared_key is None else shared_key
  r = np.repeat(np.asarray(r, np.float64)[:, :, None], W_K.shape[1], axis=2)
  # Masked positions may have any content.
  with np.errstate(all="ignore"):
    key = np.concatenate([np.einsum("BSR,RNC->BSNC", c, W_K), r], axis=-1)
    values = np.einsum("BSR,RNV->BSNV", c, W_V)
  values = values if value is None else value
  return dense_attention(query, key, values, **options)
