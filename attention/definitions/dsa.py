"""DeepSeek's sparse attention (DeepSeek-V3.2, 2025), as its paper defines it."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def selected_keys(visible, index, top_k) -> tuple[np.ndarray, np.ndarray]:
  """The scores I `[B, T, S]`, −∞ for invisible keys, and a mask of the selected keys.

  I[t, s] = Σ_i w_ti · relu(q_ti · k_s)
  """
  query, key, weight = shared.as_float64(*index)
  # Masked positions may have any content.
  key = np.where(visible.any((1, 2))[..., None], key, 0.0)
  products = np.maximum(np.einsum("btid,bsd->btis", query, key), 0.0)
  scores = np.einsum("bti,btis->bts", weight, products)
  scores = np.where(visible[:, 0], scores, -np.inf)
  # A stable sort prefers the first of several equal scores.
  order = np.argsort(-scores, axis=-1, kind="stable")
  selected = np.zeros(scores.shape, bool)
  np.put_along_axis(selected, order[..., :top_k], True, axis=-1)
  return scores, selected & visible[:, 0]


def _selected_blocks(visible, index, top_k, size):
  """A mask `[B, T, S]` of the keys in the selected blocks and of those after them."""
  a, b, w = shared.as_float64(*index)
  selected = np.zeros(visible.shape, bool)
  for n, t in np.ndindex(visible.shape[:2]):
    positions = np.flatnonzero(visible[n, t])
    count = len(positions) // size
    scores = w[n, t] @ np.maximum(a[n, t] @ b[n, :count].T, 0.0)
    best = np.argsort(-scores, kind="stable")[:top_k]
    ranks = [i for m in best for i in range(m * size, (m + 1) * size)]
    ranks += range(count * size, len(positions))
    selected[n, t, positions[ranks]] = True
  return selected


def dsa_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  index_query: ArrayLike,
  index_key: ArrayLike,
  index_weight: ArrayLike,
  top_k: int,
  index_block_size: int = 1,
  scale: float | ArrayLike | None = None,
  is_causal: bool = True,
  **options: Any,
) -> shared.Result:
  """Every query attends to the `top_k` keys of the largest I[t, s].

  Args:
    index_query: q, `[B, T, I, D]`.
    index_key: k, `[B, S, D]`.
    index_weight: w, `[B, T, I]`.
    top_k: the number of keys per query; of several equal scores, the first is selected.
    index_block_size: if m is above 1, `index_key` has a row for every m unmasked keys,
      and a query attends to `top_k` of the whole blocks before it and to the keys after
      these blocks (code of Qwen4-Exp and GLM-5.3-Flash in transformers 5.24.0).
    scale: factor of the logits; None is 1/√H.
    is_causal: whether query t sees only keys s ≤ t.
    **options: mask and segments.

  Paper: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
  """
  visible = shared.visible_pairs(query, key, is_causal=is_causal, **options)
  index = index_query, index_key, index_weight
  if index_block_size > 1:
    selected = _selected_blocks(visible[:, 0], index, top_k, index_block_size)
  else:
    _, selected = selected_keys(visible, index, top_k)
  return dense_attention(query, key, value, mask=selected[:, None], scale=scale)


def dsa_indexer_loss(
  query, key, *, top_k=None, scale=None, is_causal=True, **options
) -> np.ndarray:
  """KL(mean over heads of the weights ‖ softmax of I), over selected keys, `[B, T]`."""
  index = [options.pop(f"index_{x}") for x in ("query", "key", "weight")]
  visible = shared.visible_pairs(query, key, is_causal=is_causal, **options)
  top_k = np.shape(key)[1] if top_k is None else top_k
  scores, selected = selected_keys(visible, index, top_k)
  query, key = shared.as_float64(query, key)
  key = shared.repeat_heads(key, query.shape[2])
  scale = shared.logit_scale(scale, query.shape[3])
  loss = np.zeros(query.shape[:2])
  for b, t in np.ndindex(loss.shape):
    s = np.flatnonzero(selected[b, t])
    logits = scale * np.einsum("nh,snh->ns", query[b, t], key[b, s])
    p, q = shared.softmax(logits).mean(0), shared.softmax(scores[b, t, s])
    loss[b, t] = np.sum(p * np.log(p / q))
  return loss
