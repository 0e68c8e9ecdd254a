"""DeepSeek sparse attention: an indexer selects keys (DeepSeek-V3.2, 2025)."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.flash import flash_attention
from attention.mechanism import Attention, Hyperparameters, accepted_options
from attention.platform import backend, layout
from attention.platform.blocks import chunk_map
from attention.softmax import cache as caches
from attention.softmax import indexer
from attention.softmax.block_selection import compact, cumulative_counts
from attention.softmax.indexer import dsa_indexer_loss
from attention.softmax.rows import Output

_MAX_RANGES = 4
"""The largest number of ranges of causal queries; each range skips later keys."""

_MIN_RANGE = 1024
"""The smallest number of queries in a range."""

_ONE_SEQUENCE = {
  **checks.ARRAYS,
  "key": Float[Array, "B T K H"],
  "value": Float[Array, "B T K V"],
}


@attention_function
def dsa_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  index_query: Float[Array, "B T I D"],
  index_key: Float[Array, "B M D"],
  index_weight: Float[Array, "B T I"],
  top_k: int,
  index_block_size: int = 1,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  block_size: int | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to the keys that an indexer scores highest for it.

    out = dsa_attention(q, k, v, index_query=a, index_key=b, index_weight=w, top_k=64)

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = the `top_k` visible keys s with the largest I[t, s], for all heads
    I[t, s] = Σ_i index_weight[t, i] · relu(index_query[t, i] · index_key[s])

  Of keys with equal scores, the earlier ones are selected.

  With `index_block_size` m above 1, keys are selected in blocks of m, in causal calls
  only. A query attends to the last, incomplete block, and to the `top_k` complete
  blocks i with the largest I[t, i] = Σ_j index_weight[t, j] · relu(index_query[t, j] ·
  index_key[i]). `compressed_entries` pools index keys, by their mean (Qwen4-Exp) or by
  a softmax (GLM-5.3-Flash). Masked positions are not counted in blocks, so padding on
  the left never affects the output.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    index_query: the queries of I index heads.
    index_key: the keys of all index heads, one for each key (M = S) or for each
      complete block (M = S // m).
    index_weight: the weight of each index head, for each query.
    top_k: the largest number of keys, or of complete blocks, that a query attends to.
    index_block_size: m.
    mask: key mask, `[B, 1, 1, S]`.
    block_size: C, the number of queries scored at a time; None means the platform's
      choice.
    is_causal: query t sees only keys s ≤ t.
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `flash_attention`. No gradient flows to the index arrays; `dsa_indexer_loss`
    trains them.

  Raises:
    ValueError: the mask varies along queries, M is wrong, or `index_block_size` is
      above 1 in a call with segments or without causality.

  Cost: time T·S·I·D for the scores, about 70·T·S for the selection and T·S·N·(H+V):
  a kernel over all keys is faster than gathering a few for each query. Memory as in
  `flash_attention`, and B·C·S·(I+1) scores. With `top_k` ≥ S it is flash attention.

  Paper: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
  """
  keep = checks.key_mask(mask, query, key, indexer.INSTEAD)
  size, count = index_block_size, index_key.shape[1]
  if count != key.shape[1] // size:
    raise ValueError(
      f"index_key: expected {key.shape[1] // size} index keys for {key.shape[1]} keys "
      f"in blocks of {size}, got {count}"
    )
  options = {"scale": scale, "return_lse": return_lse}
  index = jax.lax.stop_gradient((index_query, index_weight, index_key))
  if size > 1:
    if query_segment_ids is not None or not is_causal:
      raise ValueError(
        "index_block_size: expected 1 with segments or without is_causal, got "
        f"{size}"
      )
    return _attend_blocks(
      (query, key, value), index, keep, size, top_k, options
    )
  if top_k >= key.shape[1]:
    return flash_attention(
      query,
      key,
      value,
      mask=mask,
      is_causal=is_causal,
      query_segment_ids=query_segment_ids,
      key_segment_ids=key_segment_ids,
      block_size=block_size,
      **options,
    )
  key, value = (layout.zero_masked(x, keep) for x in (key, value))
  # The gradient of a key is a sum over all chunks, in float32.
  float32_kv = key.astype(jnp.float32), value.astype(jnp.float32)
  rows = indexer.Rows(index[0], index[1], query_segment_ids, query)
  keys = indexer.Keys(index[2], keep, key_segment_ids)

  def attend_range(start, end):
    """The results of the queries from `start` to `end`."""
    num_keys = end if is_causal else key.shape[1]
    own_rows = jax.tree.map(lambda x: x[:, start:end], rows)
    own_keys, *kv = jax.tree.map(lambda x: x[:, :num_keys], (keys, *float32_kv))

    def attend(rows):
      scores = indexer.index_scores(rows, own_keys, is_causal)
      return flash_attention(
        rows.query,
        kv[0].astype(key.dtype),
        kv[1].astype(value.dtype),
        mask=indexer.select(scores, top_k)[:, None],
        **options,
      )

    scores_per_row = num_keys * index_query.shape[2]
    return indexer.map_query_chunks(
      attend, own_rows, scores_per_row, block_size, start
    )

  length, ranges = query.shape[1], 1
  if is_causal:
    ranges = max(min(length // _MIN_RANGE, _MAX_RANGES), 1)
  ends = [length * (i + 1) // ranges for i in range(ranges)]
  results = list(map(attend_range, [0, *ends[:-1]], ends))
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *results)


def _attend_blocks(qkv, index, keep, size, top_k, options):
  """`dsa_attention` for blocks of `size` unmasked keys."""
  query, key, value = qkv
  positions = cumulative_counts(keep, query.shape[:2])
  if keep is not None:
    key, value = compact(keep, key, value)
  index_query, index_weight, index_key = index
  count = index_key.shape[1]
  key_positions = jnp.arange(key.shape[1])[None, None]

  def attend(rows):
    num_visible = rows.place[..., None]
    is_complete = jnp.arange(count)[None, None] < num_visible // size
    keys = indexer.Keys(index_key, None, None)
    scores = indexer.index_scores(rows, keys, is_causal=False)
    blocks = indexer.select(jnp.where(is_complete, scores, -jnp.inf), top_k)
    # The last block may be incomplete.
    blocks = jnp.pad(
      jnp.repeat(blocks, size, axis=2), ((0, 0), (0, 0), (0, size))
    )
    mask = blocks[..., : key.shape[1]]
    mask |= key_positions // size == num_visible // size
    mask &= key_positions < num_visible
    return flash_attention(
      rows.query, key, value, mask=mask[:, None], **options
    )

  rows = indexer.Rows(index_query, index_weight, None, query, positions)
  row_bytes = 4 * len(key) * (key.shape[1] + count * index_query.shape[2])
  rows_per_tile = backend.rows_per_tile(row_bytes, query.shape[1], least=64)
  return chunk_map(attend, rows_per_tile, rows)


@attention_factory
def dsa(
  top_k: int = 256,
  num_index_heads: int = 4,
  index_dim: int = 32,
  query_rank: int | None = None,
  index_key_norm: bool = False,
  index_rotary_dim: int | None = None,
  has_indexer: bool = True,
) -> Attention:
  """The mechanism of `dsa_attention`, whose indexer reads the layer's inputs x.

    index_query = R_t (x_t · W_q)    index_key = R_t (x_t · W_k)
    index_weight = x_t · W_w / √(I·D)

  R_t rotates half of the features by position t. DeepSeek-V3.2 applies a layer norm to
  x_t · W_k, computes index_query from the latent vectors of its queries, and rotates
  `index_rotary_dim` features, as in queries and keys. Only `loss` trains the indexer:
  the mean of `dsa_indexer_loss` over the unmasked positions, without a gradient to x.

  Args:
    top_k: the number of keys that a query attends to. With T or more, attention is
      dense and the indexer learns from all keys, as in the paper's warm-up.
    num_index_heads: I.
    index_dim: D, a multiple of 4 without `index_rotary_dim`.
    query_rank: the model's `query_rank`, the width of the third argument of `gates`,
      from which it computes index_query; None computes it from x.
    index_key_norm: whether index keys have a layer norm.
    index_rotary_dim: the even number of features, from the first, that a model with
      rotary positions rotates; None means half of them, with θ = 10,000 in any model.
    has_indexer: whether the layer has an indexer. Without one, it uses the index arrays
      of the nearest earlier layer that has one of the same sizes, and so selects the
      same positions (GLM-5). It computes the scores again, as that layer does not store
      them.

  Returns:
    An `Attention` that decodes with an `IndexedCache`. Its parameters are
    `index_query_kernel [F, I, D]`, `index_key_kernel [F, D]` and
    `index_weight_kernel [F, I]`, and with `index_key_norm` `index_key_scale` and
    `index_key_bias`, each `[D]`.

  Raises:
    ValueError: an argument is not a positive int, D is not a multiple of 4, or
      `index_rotary_dim` is odd or above D.

  Unlike the paper's, the indexer does not use 8-bit numbers, and so needs no Hadamard
  transform, which does not change the scores.
  """
  attend = make_apply("dsa", partial(dsa_attention, top_k=top_k))
  indexer.check_rotation(index_dim, index_rotary_dim)
  options = indexer.Options(
    num_index_heads,
    index_dim,
    query_rank,
    norm="layer" if index_key_norm else None,
    rotary_dim=index_rotary_dim,
  )

  def init(key, dims):
    return {"params": indexer.init(key, dims, options)} if has_indexer else {}

  def gates(variables, inputs, query_inputs=None):
    return indexer.project(variables["params"], options, inputs, query_inputs)

  def apply(variables, query, key, value, *, mask=None, **call):
    qkv = {"query": query, "key": key, "value": value}
    checks.check_call(qkv, _ONE_SEQUENCE, needed=qkv)
    call = indexer.index_arrays("dsa", options, query, key, mask, call)
    call = {"is_causal": False, "mask": mask, **call}
    return attend(variables, query, key, value, **call)

  def loss(variables, query, key, **call):
    del variables
    call = indexer.rotate(call, jnp.arange(query.shape[1])[None])
    call = {"is_causal": False, "top_k": top_k, **call}
    call = accepted_options("dsa", dsa_indexer_loss, call)
    losses = dsa_indexer_loss(query, key, **call)
    keep = checks.key_mask(call.get("mask"), query, key, indexer.INSTEAD)
    return indexer.mean_loss(losses, keep)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    return caches.init_indexed(batch, max_length, dims, dtype, index_dim)

  def decode(variables, cache, query, key, value, **call):
    call = indexer.rotate(call, cache.index[:, None])
    cache = caches.append_indexed(cache, key, value, call["index_key"])
    is_set = jnp.arange(cache.key.shape[1])[None] < cache.index[:, None]
    call["index_key"] = cache.index_key
    masking = {"mask": is_set[:, None, None], "is_causal": False}
    out = attend(variables, query, cache.key, cache.value, **call, **masking)
    return out, cache

  return Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=indexer.prefill,
    supports=frozenset({"causal", "mask", "segments", "decode"}),
    approximates="dense",
    gates=gates if has_indexer else None,
    loss=loss if has_indexer else None,
    reads_query_inputs=has_indexer and query_rank is not None,
    shares_gates=not has_indexer,
    sizes=Hyperparameters(
      short={"top_k": 4, "num_index_heads": 2, "index_dim": 8},
      timed=lambda length: {"top_k": min(256, length)},
    ),
  )
