"""Multiplicative attention (Luong et al., 2015), as the paper defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def multiplicative_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  kernel: ArrayLike | None = None,
  scale: float | ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Bilinear scores with a trained matrix: softmax(Q W Kᵀ) V.

    dot      score(t, s) = q_t · k_s                 kernel None
    general  score(t, s) = q_t · W_n k_s             kernel W

  This equals `dense_attention` with the queries W_nᵀ q_t and the scale 1.

  Args:
    kernel: W, `[N, H, H]`, query features first.
    scale: factor of the scores; None is 1.
    **options: as `dense_attention`.

  Paper: arXiv:1508.04025, section 3.1.
  """
  if kernel is not None:
    query, kernel = shared.as_float64(query, kernel)
    query = np.einsum("BTNH,NHI->BTNI", query, kernel)
  scale = 1.0 if scale is None else scale
  return dense_attention(query, key, value, scale=scale, **options)
