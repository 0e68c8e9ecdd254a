"""Differential attention (Ye et al., 2024), as the paper defines it."""

from jaxtyping import Float64
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
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """(softmax(scale · Q₁ K₁ᵀ) − λ softmax(scale · Q₂ K₂ᵀ)) V.

  Args:
    query: `[B, T, N, H]`; Q₁ is its first half along H, Q₂ its second.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    weight: λ.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√(H/2).
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: Differential transformer, arXiv:2410.05258, equation 1.
  """
  query, key = shared.as_float64(query, key)
  first, second = (
    dense_attention(
      query[..., half],
      key[..., half],
      value,
      mask=mask,
      is_causal=is_causal,
      scale=scale,
      query_segment_ids=query_segment_ids,
      key_segment_ids=key_segment_ids,
    )
    for half in np.split(np.arange(query.shape[-1]), 2)
  )
  return first - np.asarray(weight) * second
