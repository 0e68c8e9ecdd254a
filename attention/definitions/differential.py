"""Differential attention (Ye et al., 2024), as the paper defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def differential_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  weight: ArrayLike | float,
  **options: Any,
) -> shared.Result:
  """(softmax(scale · Q₁ K₁ᵀ) − λ softmax(scale · Q₂ K₂ᵀ)) V.

  Args:
    query: Q₁ and Q₂, concatenated along H.
    key: K₁ and K₂, concatenated along H.
    value: `[B, S, K, V]`.
    weight: λ.
    **options: as `dense_attention`; scale None is 1/√(H/2).

  Paper: Differential transformer, arXiv:2410.05258, equation 1.
  """
  queries, keys = (np.split(x, 2, -1) for x in shared.as_float64(query, key))
  first, second = (
    dense_attention(q, k, value, **options)
    for q, k in zip(queries, keys, strict=True)
  )
  return first - np.asarray(weight) * second
