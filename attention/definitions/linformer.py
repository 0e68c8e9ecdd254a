"""Linformer (Wang et al., 2020), as the paper defines it."""

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def linformer_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  key_projection: ArrayLike,
  value_projection: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Softmax over R learned mixtures of the keys.

    out = softmax(scale · Q (Eᵀ K)ᵀ) (Fᵀ V)

  Masked keys and values are zero before they are mixed. An input of S
  positions uses the first S rows of E and F.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    key_projection: E, `[S', R]`, or `[K, S', R]` with one for each key head;
      S' ≥ S.
    value_projection: F, of the same form; None is E.
    mask: key mask, True = attend, broadcastable to `[B, 1, 1, S]`.
    is_causal: must be False: each of the R rows mixes all positions.
    scale: factor of the logits; None is 1/√H.

  Returns:
    `[B, T, N, V]` float64; zeros for an example whose keys are all masked.

  Raises:
    ValueError: `is_causal`, or a mask that is not a key mask.

  Paper: Linformer, section 4, arXiv:2006.04768.
  """
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if value_projection is None:
    value_projection = key_projection
  query, key, value, E, F = shared.as_float64(
    query, key, value, key_projection, value_projection
  )
  batch, length, num_heads, head_dim = query.shape
  source_length, num_kv_heads = key.shape[1:3]
  scale = shared.logit_scale(scale, head_dim)
  E, F = (
    np.broadcast_to(
      projection[..., :source_length, :],
      (num_kv_heads, source_length, projection.shape[-1]),
    )
    for projection in (E, F)
  )
  visible = shared.visible_tokens(mask, batch, source_length)
  key, value = (
    np.where(visible[:, :, None, None], x, 0.0) for x in (key, value)
  )

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n in np.ndindex(batch, num_heads):
    k = n // (num_heads // num_kv_heads)
    keys = E[k].T @ key[b, :, k]
    values = F[k].T @ value[b, :, k]
    if visible[b].any():
      out[b, :, n] = shared.softmax(scale * query[b, :, n] @ keys.T) @ values
  return out
