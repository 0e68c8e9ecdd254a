"""Mixture of block attention: each query selects blocks of keys by their mean key.

In the variant of MiniMax-M3, an indexer selects the blocks.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import dense
from attention.mechanism import Attention, Hyperparameters, no_variables
from attention.recurrent.features import visible_keys
from attention.softmax import cache as caches
from attention.softmax import indexer
from attention.softmax.block_selection import (
  compact,
  indexer_blocks,
  moba_blocks,
)
from attention.softmax.cache import append
from attention.softmax.rows import Output
from attention.softmax.selected_blocks import selected_attention


@attention_function
def moba_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  block_size: int,
  top_k: int,
  index_query: Float[Array, "B T I D"] | None = None,
  index_key: Float[Array, "B T D"] | None = None,
  local_blocks: checks.FromZero = 1,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to its own block and to the best-scoring past blocks.

    out = moba_attention(q, k, v, block_size=64, top_k=4)

    out[t] = softmax over s in A(t) of (scale · q_t · k_s), times value
    A(t) = {s ≤ t : s // D ∈ {t // D} ∪ best(t)}
    best(t) = the top_k − 1 blocks m < t // D of largest q_t · mean(k_s : s // D = m)

  for each query head, with D = `block_size`. Of blocks with equal scores, the earlier
  ones are selected. Means are over unmasked keys, and a fully masked block is never
  selected.

  With `index_query` a and `index_key` b, index head i selects for its group of query
  heads:

    A(t) = {s ≤ t : s // D is one of the `local_blocks` up to t // D, or best_i(t)}
    best_i(t) = the blocks m of largest max(a_ti · b_s : s ≤ t, s // D = m)

  with `top_k` blocks in total. Positions t and s then count only unmasked positions, so
  padding on the left never affects the output.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    block_size: D.
    top_k: the number of blocks that a query attends to, including its own.
    index_query: the queries of I index heads; N is a multiple of I.
    index_key: the keys of all index heads.
    local_blocks: the number of nearest blocks that are always selected, with an
      indexer.
    mask: key mask, `[B, 1, 1, T]`.
    is_causal: must be True, because a mean depends on all keys of its block.
    scale: factor of the logits; None means 1/√H.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `flash_attention`. Gradients are those of the softmax over the selected keys;
    the selection of blocks has none.

  Raises:
    ValueError: the mask varies along queries, `is_causal` is False, or one of the
      index arrays is missing.

  Cost: that of `selected_attention` with top_k blocks. The selection takes time
  T·(T/D)·N·H, or T·T·I times the width of the indexer, and T·(T/D)·N·top_k more on
  accelerators. Memory is linear in T.

  Papers: MoBA: mixture of block attention for long-context LLMs, arXiv:2502.13189; the
  indexer is that of MiniMax-M3's code.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; moba selects past blocks; use "
      "selected_attention with your own blocks"
    )
  instead = "moba attention selects blocks for each query; give a key mask"
  keep = visible_keys(mask, query, key, instead)
  positions = jnp.broadcast_to(jnp.arange(query.shape[1])[None], keep.shape)
  if (index_query is None) != (index_key is None):
    raise ValueError(
      "index_query: expected both or neither of index_query and index_key, got "
      "one"
    )
  if index_query is None or index_key is None:
    indexer.check_defaults("index_query", local_blocks=(local_blocks, 1))
    blocks = moba_blocks(query, key, keep, positions, block_size, top_k)
  else:
    if mask is not None:
      positions = jnp.cumsum(keep, axis=1) - 1
      key, value, index_key, keep = compact(keep, key, value, index_key, keep)
    blocks = indexer_blocks(
      index_query,
      index_key,
      keep,
      positions,
      block_size,
      top_k,
      local_blocks,
      query.shape[2],
    )
  return selected_attention(
    query,
    key,
    value,
    block_indices=blocks,
    block_size=block_size,
    mask=keep[:, None, None],
    scale=scale,
    query_positions=positions,
    return_lse=return_lse,
  )


def _attend_to_cache(query, cache, blocks, block_size, visible, scale) -> Any:
  """The output at one position for the selected blocks of a cache."""
  return selected_attention(
    query,
    cache.key,
    cache.value,
    block_indices=blocks,
    block_size=block_size,
    mask=visible[:, None, None],
    is_causal=False,
    scale=scale,
  )


@attention_factory
def moba(
  block_size: int = 64,
  top_k: int = 4,
  num_index_heads: int | None = None,
  index_dim: int = 32,
  local_blocks: checks.FromZero = 1,
  index_norm_epsilon: float | None = None,
  index_rotary_dim: int | None = None,
) -> Attention:
  """The mechanism of `moba_attention`.

  Args:
    block_size: D.
    top_k: the number of blocks that a query attends to, including its own.
    num_index_heads: I of an indexer, whose queries and keys are projections of the
      inputs; None selects blocks by their mean keys.
    index_dim: the width of the indexer, a multiple of 4 without `index_rotary_dim`.
    local_blocks: the number of nearest blocks that are always selected.
    index_norm_epsilon: ε of the RMS norms of index queries and keys (MiniMax-M3); None
      means no norms.
    index_rotary_dim: as in `dsa`.

  Returns:
    A causal `Attention` without variables, that decodes with a `DenseCache`. Each
    decoded position averages the keys of all blocks and attends to top_k · D keys. With
    an indexer, it has the parameters `index_query_kernel`, `index_key_kernel`,
    `index_query_scale` and `index_key_scale` of `dsa`, which are not trained, and
    decodes with an `IndexedCache`.

  Raises:
    ValueError: an argument is out of range, or requires an indexer and there is none.
  """
  sizes = {"block_size": block_size, "top_k": top_k}
  if num_index_heads is not None:
    indexer.check_rotation(index_dim, index_rotary_dim)
    options = indexer.Options(
      num_index_heads,
      index_dim,
      norm=None if index_norm_epsilon is None else "rms_from_one",
      epsilon=index_norm_epsilon or 0.0,
      rotary_dim=index_rotary_dim,
      has_weights=False,
    )
    return _moba_with_indexer(sizes, options, local_blocks)
  indexer.check_defaults(
    "num_index_heads",
    local_blocks=(local_blocks, 1),
    index_norm_epsilon=(index_norm_epsilon, None),
    index_rotary_dim=(index_rotary_dim, None),
  )
  exact = dense()

  def decode(variables, cache, query, key, value, *, scale=None):
    del variables
    index, cache = cache.index[:, None], append(cache, key, value)
    visible = jnp.arange(cache.key.shape[1])[None] <= index
    blocks = moba_blocks(query, cache.key, visible, index, block_size, top_k)
    return _attend_to_cache(
      query, cache, blocks, block_size, visible, scale
    ), cache

  return Attention(
    init=no_variables,
    apply=make_apply("moba", moba_attention, lambda variables: sizes),
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


def _moba_with_indexer(
  sizes: dict[str, int], options: indexer.Options, local_blocks: int
) -> Attention:
  """The mechanism whose blocks an indexer selects; its cache also stores index keys."""
  attend = make_apply("moba", partial(moba_attention, **sizes))

  def apply(variables, query, key, value, *, mask=None, **call):
    call = indexer.index_arrays("moba", options, query, key, mask, call)
    call = {"is_causal": False, "local_blocks": local_blocks, **call}
    return attend(variables, query, key, value, mask=mask, **call)

  def decode(variables, cache, query, key, value, *, scale=None, **call):
    del variables
    positions = cache.index[:, None]
    call = indexer.rotate(call, positions)
    cache = caches.append_indexed(cache, key, value, call["index_key"])
    visible = jnp.arange(cache.key.shape[1])[None] <= positions
    blocks = indexer_blocks(
      call["index_query"],
      cache.index_key,
      visible,
      positions,
      local_blocks=local_blocks,
      num_heads=query.shape[2],
      **sizes,
    )
    size = sizes["block_size"]
    return _attend_to_cache(query, cache, blocks, size, visible, scale), cache

  return Attention(
    init=lambda key, dims: {"params": indexer.init(key, dims, options)},
    apply=apply,
    init_cache=lambda variables, batch, max_length, dims, dtype: (
      caches.init_indexed(batch, max_length, dims, dtype, options.dim)
    ),
    decode=decode,
    prefill=indexer.prefill,
    supports=frozenset({"causal", "mask", "decode"}),
    approximates="dense",
    causal_only=True,
    gates=lambda variables, inputs: indexer.project(
      variables["params"], options, inputs
    ),
  )
