"""Multiplicative attention (Luong et al., 2015), as the paper defines it."""

from jaxtyping import Float64
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
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
  bias: ArrayLike | None = None,
  relative_bias: ArrayLike | None = None,
  relative_keys: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Scores are products, with a trained matrix between: softmax(Q W Kᵀ) V.

    dot      score(t, s) = q_t · k_s                 kernel None
    general  score(t, s) = q_t · W_n k_s             kernel W

  This is `dense_attention` with the queries W_nᵀ q_t and the scale 1.

  Args:
    query: `[B, T, N, H]`, the paper's decoder states h_t.
    key: `[B, S, K, H]`, the paper's encoder states h̄_s.
    value: `[B, S, K, V]`.
    kernel: W, `[N, H, H]`, query features first.
    mask: as in `dense_attention`, with all other options.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the scores; None is 1.
    query_segment_ids: `[B, T]`.
    key_segment_ids: `[B, S]`.
    bias: broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Paper: Effective approaches to attention-based neural machine translation,
  section 3.1, arXiv:1508.04025.
  """
  if kernel is not None:
    query, kernel = shared.as_float64(query, kernel)
    query = np.einsum("BTNH,NHI->BTNI", query, kernel)
  return dense_attention(
    query,
    key,
    value,
    mask=mask,
    is_causal=is_causal,
    scale=1.0 if scale is None else scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    bias=bias,
    relative_bias=relative_bias,
    relative_keys=relative_keys,
  )
