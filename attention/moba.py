"""Mixture of block attention: each query selects key blocks by their mean key."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.decorators import applied, attention_factory, attention_function
from attention.dense import dense
from attention.mechanism import Attention, Hyperparameters, no_variables
from attention.recurrent.features import visible_keys
from attention.softmax.block_selection import best_blocks
from attention.softmax.cache import appended
from attention.softmax.selected_blocks import selected_attention
from attention.softmax.tiles import Output


@attention_function
def moba_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  block_size: int,
  top_k: int,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to its own block and to the past blocks whose means score best.

    out = moba_attention(q, k, v, block_size=64, top_k=4)

    out[t] = softmax over s in A(t) of (scale · q_t · k_s), times value
    A(t) = {s ≤ t : s // D ∈ {t // D} ∪ best(t)}
    best(t) = the top_k − 1 blocks m < t // D of largest q_t · mean(k_s : s // D = m)

  for each query head, with D = `block_size`. Of blocks with equal scores, the earlier
  is selected. Means leave masked keys out, and a fully masked block is never selected.

  Args:
    block_size: D.
    top_k: blocks of a query, its own among them.
    mask: key mask, `[B, 1, 1, T]`.
    is_causal: must be True, because a mean depends on all keys of its block.

  Other options: as `flash_attention`.

  Returns:
    As `flash_attention`. Gradients are those of the softmax over the selected keys;
    the selection of blocks has none.

  Raises:
    ValueError: the mask varies along queries, or `is_causal` is False.

  Cost: that of `selected_attention` with top_k blocks, and T·(T/D)·N·H for the
  selection, on accelerators T·(T/D)·N·top_k more; memory linear in T.

  Paper: MoBA: mixture of block attention for long-context LLMs, arXiv:2502.13189.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; moba selects past blocks; use "
      "selected_attention with your own blocks"
    )
  instead = "moba attention selects blocks for each query; give a key mask"
  keep = visible_keys(mask, query, key, instead)
  places = jnp.broadcast_to(jnp.arange(query.shape[1])[None], keep.shape)
  blocks = best_blocks(query, key, keep, places, block_size, top_k)
  return selected_attention(
    query,
    key,
    value,
    block_indices=blocks,
    block_size=block_size,
    mask=keep[:, None, None],
    scale=scale,
    return_lse=return_lse,
  )


@attention_factory
def moba(block_size: int = 64, top_k: int = 4) -> Attention:
  """The mechanism of `moba_attention`.

  Args:
    block_size: D.
    top_k: blocks of a query, its own among them.

  Returns:
    An `Attention` without variables, causal only, that decodes with a `DenseCache`.
    Each decoded position averages the keys of all blocks and attends to top_k · D keys.

  Raises:
    ValueError: an argument is not a positive int.
  """
  sizes = {"block_size": block_size, "top_k": top_k}
  exact = dense()

  def decode(variables, cache, query, key, value, *, scale=None):
    del variables
    index, cache = cache.index[:, None], appended(cache, key, value)
    seen = jnp.arange(cache.key.shape[1])[None] <= index
    blocks = best_blocks(query, cache.key, seen, index, block_size, top_k)
    out: Any = selected_attention(
      query,
      cache.key,
      cache.value,
      block_indices=blocks,
      block_size=block_size,
      mask=seen[:, None, None],
      is_causal=False,
      scale=scale,
    )
    return out, cache

  return Attention(
    init=no_variables,
    apply=applied("moba", moba_attention, lambda variables: sizes),
    init_cache=exact.init_cache,
    decode=decode,
    prefill=exact.prefill,
    supports=frozenset({"causal", "mask", "decode"}),
    approximates="dense",
    causal_only=True,
    sizes=Hyperparameters(
      short={"block_size": 8, "top_k": 3},
      timed=lambda length: {"block_size": 64, "top_k": 4},
    ),
  )
