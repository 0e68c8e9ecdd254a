"""Attention to selected blocks of keys, as its papers define it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def selected_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  block_indices: ArrayLike,
  block_size: int,
  is_causal: bool = True,
  **options: Any,
) -> shared.Result:
  """Every query attends to the keys of its blocks: one softmax over A(t).

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s) v_s
    A(t) = {s : s // block_size ∈ block_indices[t]}, in causal calls with s ≤ t

  Args:
    block_indices: `[B, T, G, M]`; query head n has the selection n // (N/G). Invalid
      numbers are ignored, and a repeated block counts once.
    block_size: the number of keys per block.
    is_causal: whether query t sees only keys s ≤ t.
    **options: as `dense_attention`.

  Papers: Native sparse attention, arXiv:2502.11089, section 3.3; MoBA,
  arXiv:2502.13189.
  """
  indices, num_heads = np.asarray(block_indices), np.shape(query)[2]
  heads_per_selection = num_heads // indices.shape[2]

  def is_selected(b, n, t, s):
    return np.isin(s // block_size, indices[b, t, n // heads_per_selection])

  return dense_attention(
    query, key, value, is_causal=is_causal, mask_mod=is_selected, **options
  )
