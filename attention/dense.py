"""Dense softmax attention (Vaswani et al., 2017).

The logits of C queries and all keys are computed at a time. Derivatives of any order,
in forward and reverse mode, come from autodiff.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from itertools import pairwise
import math
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.platform import backend
from attention.platform.layout import cut, query_dot
from attention.softmax import dropout, own_logits
from attention.softmax import mods as mods_lib
from attention.softmax.cache import DenseCache, append, init_cache, prefill
from attention.softmax.forget_gates import next_forget_bias
from attention.softmax.logits import PLAIN, Logits, SoftmaxOptions, table_logits
from attention.softmax.mods import MaskMod, ScoreMod
from attention.softmax.rows import Output, softmax_and_lse, with_sinks
from attention.softmax.sharding import attend_to_shards
from attention.softmax.visible import EVERY_PAIR, Visible

_ONE_BLOCK = 512
"""The largest T that is computed as one block by default."""


@attention_function
def dense_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
  axis_name: str | None = None,
  visible: Visible = EVERY_PAIR,
  logits: Logits = PLAIN,
  return_lse: bool = False,
  **pairs: Unpack[SoftmaxOptions],
) -> Output:
  """Every query attends to every key: softmax(scale · Q Kᵀ + bias) V.

    out = dense_attention(q, k, v, mask=keep[:, None, None, :])

  Logits, softmax and normaliser are float32, or float64 if the query is. A query that
  may attend to no key outputs zeros and has zero gradients.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; N is a multiple of K, and query head n uses key head
      n // (N/K).
    value: `[B, S, K, V]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`. Keys and values
      that are masked for every query never affect the output, even if they are NaN.
    is_causal: query t sees only keys s ≤ t, even if T ≠ S; flash-attn aligns the last
      query with the last key, which is `visible=causal() & Visible(query_start=S - T)`.
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`, added to the logits by clipped distance, see
      `attention.softmax.logits`.
    relative_keys: `[2L+1, H]`, Shaw's keys by clipped distance, or
      `[N, 2L+1, H]`, a table for each head (Transformer-XL).
    relative_queries: `[2L+1, H]` or `[N, 2L+1, H]`, queries by clipped distance, whose
      product with the key is added (DeBERTa).
    sinks: `[N]`, one more logit per head, which takes weight but has no value
      (gpt-oss), or `[B, T, N]`, one per query and head (Inkling 2).
    logits_soft_cap: c; the scaled products of query and key become
      c · tanh(x / c), before masks, biases and tables (Gemma 2).
    log_forget: `[B, T, N]`, logarithms of forget gates, at most 0: Σ log f_u over
      s < u ≤ t is added to the logits (FoX). Only for causal calls with T = S. At
      masked positions of a key mask, the gate is 1.
    score_mod: `(score, b, n, t, s) -> score` with indices that broadcast, as in
      FlexAttention, applied before `bias` and `log_forget` are added. Gradients flow to
      arrays that it closes over.
    mask_mod: `(b, n, t, s) -> bool`, True = attend, in addition to `mask`.
    dropout_rate: fraction of the attention weights that are set to zero; the others are
      divided by 1 - rate.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0. Keys `[1, 1]`
      drop the same pairs in all examples and heads.
    block_size: C, the number of queries computed at the same time; None means all of a
      short sequence, and the choice of `attention.platform.backend` for a long one.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`. Each device
      has consecutive positions of every array that has a sequence axis, in order. The
      mask must be `[B, 1, 1, S]`. Of the options for logits, only `scale` and the
      relative tables are supported.
    visible: the visible pairs, in addition to the other masking options.
    logits: the options for logits as one value, in place of the keywords.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; with `return_lse` also `[B, T, N]`, in
    the dtype of the logits, −∞ for a query that sees no key. Both have gradients,
    so that results over disjoint sets of keys can be merged
    (`attention.softmax.rows.merge`).

  Cost: time T·S·N·(H+V), three quarters of it for a causal call of several blocks;
  memory B·N·C·S float32 for the logits of C queries at a time. If C < T, the backward
  pass recomputes them. The function can be differentiated any number of times, in
  forward and reverse mode.

  Extends the paper to queries that see no key, key heads that several query heads
  share, and biases.

  Papers: Attention is all you need, section 3.2.1, arXiv:1706.03762. Sinks: gpt-oss,
  arXiv:2508.10925. Soft caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting
  transformer, arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  if axis_name is not None:
    out, lse = attend_to_shards(
      query,
      key,
      value,
      visible,
      logits,
      axis_name=axis_name,
      dropout_rate=dropout_rate,
      dropout_rng=dropout_rng,
      block=(block_size, None),
    )
    return (out, lse) if return_lse else out
  batch, _, num_heads, _ = query.shape
  query_dtype, dtype = query.dtype, jnp.promote_types(query.dtype, jnp.float32)
  if query.dtype == dtype:
    # An array as scale is multiplied into the queries, which is less work than scaling
    # the logits, but loses precision in half precision.
    scale = logits.scale
    if scale is None:
      scale = 1.0 / math.sqrt(query.shape[3])
    logits = dataclasses.replace(logits, scale=jnp.asarray(scale, dtype))
  query, scores, _ = logits.scores(query, visible)
  # Each call of `attend` receives the bias of its own queries.
  scores = dataclasses.replace(scores, bias=None, dtype=dtype)
  keys, values = (jnp.swapaxes(visible.readable(x), 1, 2) for x in (key, value))

  def attend(start, query, bias, num_keys):
    """(out, lse) of C queries, the first at `start`, over `num_keys` keys."""
    rows = query.shape[1]
    pairs = batch, num_heads, rows, num_keys
    places = visible.places(start, 0)
    mask = visible.trace(pairs).block(start, rows, 0, num_keys)
    tile = dataclasses.replace(scores.cut(start, rows, 0, num_keys), bias=bias)
    x = tile.tile(jnp.swapaxes(query, 1, 2), keys[:, :, :num_keys], places)
    weights, lse = softmax_and_lse(x, mask)
    if dropout_rate:
      weights *= dropout.pair_factors(
        dropout_rng,
        dropout_rate,
        *pairs[:2],
        places[0] + jnp.arange(rows),
        places[1] + jnp.arange(num_keys),
      )
    weights = weights.astype(value.dtype)
    out = query_dot("bkqd,bkdv->bkqv", weights, values[:, :, :num_keys], dtype)
    out, lse = (jnp.swapaxes(y, 1, 2) for y in (out, lse))
    if logits.sinks is not None:
      sinks = logits.sinks
      if sinks.ndim > 1:
        sinks = cut(sinks, start, rows, axis=1)
      out, lse = with_sinks(out, lse, sinks)
    return out.astype(query_dtype), lse

  length, source_length = query.shape[1], key.shape[1]
  rows = block_size
  if rows is None and length <= _ONE_BLOCK:
    rows = length  # One block, without recomputation.
  elif rows is None:
    row_bytes = 4 * batch * num_heads * source_length
    rows = backend.rows_per_tile(row_bytes, length, least=256)
  if length <= rows:
    out, lse = attend(0, query, logits.bias, source_length)
  else:
    is_causal = visible.right == 0 and visible.positions is None
    out, lse = _map_blocks(
      attend, query, logits.bias, rows, source_length, is_causal
    )
  return (out, lse) if return_lse else out


def _map_blocks(
  attend: Callable[..., Any],
  query: Float[Array, "B T N H"],
  bias: Float[Array, "#B #N #T #S"] | None,
  rows: int,
  source_length: int,
  is_causal: bool,
) -> list[Array]:
  """Applies `attend` to blocks of queries, which the backward pass recomputes.

  On a CPU, a block stays in cache during the softmax, unlike the whole matrix.
  """
  batch, length = query.shape[:2]
  # The first half of the queries skips later keys. More ranges would mean more loops
  # to compile.
  count = length // rows
  half = count // 2 if is_causal else 0
  results = []
  for start, end in pairwise(sorted({0, half * rows, count * rows, length})):
    size = min(rows, end - start)
    num_keys = min(end, source_length) if is_causal else source_length
    inputs = jnp.arange(start, end, size), _blocks(query, start, end, size, 1)
    key_bias = bias if bias is None else bias[..., :num_keys]
    if key_bias is not None and key_bias.shape[2] > 1:
      # Inside the loop, the gradient of each slice would be as large as the bias.
      inputs += (_blocks(key_bias, start, end, size, 2),)
      block = partial(attend, num_keys=num_keys)
    else:
      block = partial(attend, bias=key_bias, num_keys=num_keys)
    block = jax.checkpoint(block, prevent_cse=False)
    results.append(jax.lax.map(lambda x, block=block: block(*x), inputs))
  return [
    jnp.concatenate(
      [jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:]) for x in blocks],
      axis=1,
    )
    for blocks in zip(*results, strict=True)
  ]


def _blocks(x: Array, start: int, end: int, size: int, axis: int) -> Array:
  """Slices from `start` to `end` along an axis, as blocks along a new first axis."""
  x = jax.lax.slice_in_dim(x, start, end, axis=axis)
  x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x, axis, 0)


def decode(
  cache: DenseCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  *,
  log_forget: Float[Array, "B 1 N"] | None = None,
  **options: Any,
) -> tuple[Float[Array, "B 1 N V"], DenseCache]:
  """Decodes one position, as the causal call does, in time S·N·H.

  `options` are the options for logits of `dense_attention`, and `mask_mod`.
  """
  index = cache.index[:, None]
  positions = jnp.arange(cache.key.shape[1])[None]
  is_new = positions == index
  new_cache = append(cache, key, value)
  forget_bias = next_forget_bias(cache.forget_bias, log_forget, is_new)
  out = attend_to_cache(
    query,
    new_cache.key,
    new_cache.value,
    mask=(positions <= index)[:, None],
    distance=(positions - index)[:, None],
    positions=(cache.index, jnp.broadcast_to(positions, is_new.shape)),
    forget_bias=forget_bias,
    **options,
  )
  return out, new_cache._replace(forget_bias=forget_bias)


def attend_to_cache(
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  mask: Bool[Array, "B #N S"],
  distance: Int[Array, "B #N S"],
  positions: tuple[Int[Array, "B"], Int[Array, "B S"]],
  forget_bias: Float[Array, "B S N"] | None,
  scale: float | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  relative_queries: Float[Array, "... P H"] | None = None,
  score_mod: ScoreMod | None = None,
  mask_mod: MaskMod | None = None,
  **options: Any,
) -> Any:
  """One query of each example attends to the cached keys that `mask` selects.

  `distance`, from the query to each key, is the index into relative tables. `positions`
  are those of the query and of the keys. `forget_bias` is the cumulative log forget
  gate since each key. `options` are those of `dense_attention`.
  """
  tables = relative_bias, relative_keys, relative_queries
  bias = table_logits(*tables, query, key, distance, scale)
  score_mod, mask_mod, bias = mods_lib.mods_for_decode(
    score_mod, mask_mod, bias, *positions
  )
  if forget_bias is not None:
    forget_bias = jnp.swapaxes(forget_bias, 1, 2)[:, :, None]
    bias = forget_bias if bias is None else bias + forget_bias
  return dense_attention(
    query,
    key,
    value,
    mask=mask[:, :, None],
    bias=bias,
    scale=scale,
    score_mod=score_mod,
    mask_mod=mask_mod,
    **options,
  )


@attention_factory
def dense(
  sinks: bool | Literal["inputs"] = False,
  logits_soft_cap: float | None = None,
  forget: bool = False,
) -> Attention:
  """The mechanism of `dense_attention`.

  Args:
    sinks: whether each head has a trained logit that takes weight but has no value:
      `sinks [N]` in `params` (gpt-oss). With 'inputs', it is computed from the inputs
      of the queries as x_t · W, with `sink_kernel [F, N]` in `params` (Inkling 2).
    logits_soft_cap: c of c · tanh(x / c); None means no cap (Gemma 2).
    forget: whether each head has a forget gate, computed from the inputs as
      log σ(x_t · W + b), with `forget_kernel [F, N]` and `forget_bias [N]` in `params`
      (FoX, arXiv:2503.02130). The mechanism is then only causal.

  Returns:
    An `Attention` that decodes with a `DenseCache`. Without sinks and forget gates it
    has no variables.
  """
  own = own_logits.OwnLogits(sinks, logits_soft_cap, forget)

  def init_dense_cache(variables, batch, max_length, dims, dtype):
    del variables
    return init_cache(batch, max_length, dims, dtype, forgets=forget)

  def decode_next(variables, cache, query, key, value, **call):
    call = {**own.options(variables), **call}
    return decode(cache, query, key, value, **call)

  def prefill_cache(
    variables,
    cache,
    query,
    key,
    value,
    lengths,
    *,
    scale=None,
    log_forget=None,
    sinks=None,
  ):
    del variables, query, scale, sinks  # The cache stores plain keys.
    return prefill(cache, key, value, lengths, log_forget)

  return Attention(
    init=own.init,
    apply=own.make_apply("dense", dense_attention),
    init_cache=init_dense_cache,
    decode=decode_next,
    supports=own.supports(
      {
        "causal",
        "cross",
        "rowwise",
        "mask",
        "full_mask",
        "segments",
        "bias",
        "relative",
        "dropout",
        "decode",
        "sequence",
      }
    ),
    approximates="dense",
    prefill=prefill_cache,
    causal_only=forget,
    gates=own.gates,
  )
