"""Linformer (Wang et al., 2020), as the paper defines it."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


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
) -> shared.Result:
  """Softmax over R learned mixtures of the keys.

    out = softmax(scale · Q (Eᵀ K)ᵀ) (Fᵀ V)

  Masked keys and values are set to zero before the mixing. An input of S positions
  uses the first S rows of E and F. If all keys of an example are masked, its results
  are zeros.

  Args:
    key_projection: E, `[S', R]`, or `[K, S', R]` with one per key head; S' ≥ S.
    value_projection: F, with the same shape; None is E.
    mask: key mask, broadcastable to `[B, 1, 1, S]`.
    is_causal: must be False: each of the R rows mixes all positions.
    scale: factor of the logits; None is 1/√H.

  Paper: Linformer, section 4, arXiv:2006.04768.
  """
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if value_projection is None:
    value_projection = key_projection
  key, value, E, F = shared.as_float64(
    key, value, key_projection, value_projection
  )
  batch, source_length, num_kv_heads, _ = key.shape
  E, F = (
    np.broadcast_to(x, (num_kv_heads, *x.shape[-2:]))[:, :source_length]
    for x in (E, F)
  )
  visible = shared.visible_tokens(mask, batch, source_length)
  keys = np.einsum("KSR,BSKH->BRKH", E, shared.zero_masked(key, visible))
  values = np.einsum("KSR,BSKV->BRKV", F, shared.zero_masked(value, visible))
  any_key = np.any(visible, axis=1)[:, None, None, None]
  return dense_attention(query, keys, values, mask=any_key, scale=scale)
