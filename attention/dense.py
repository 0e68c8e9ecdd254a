"""Dense softmax attention (Vaswani et al., 2017)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import (
  arguments,
  dropout,
  forgetting,
  layout,
  own_logits,
  plug,
  relative,
)
from attention import mods as mods_lib
from attention.implementations import InParts
from attention.mods import MaskMod, ScoreMod
from attention.rows import by_rows
from attention.softmax import masked_softmax
from attention.visible import visible_from_options


@arguments.attention_function()
def dense_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  bias: Float[Array, "..."] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  sinks: Float[Array, "N"] | None = None,
  logits_soft_cap: float | None = None,
  log_forget: Float[Array, "B T N"] | None = None,
  score_mod: ScoreMod | None = None,
  mask_mod: MaskMod | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Every query attends to every key: softmax(scale · Q Kᵀ + bias) V.

  Logits, softmax and normaliser are float32, or float64 like the query. Masked
  logits take no part in the softmax. A query that may attend to no key gets
  zeros and passes no gradient.

  This module is the formula for C rows of queries. Which pairs count is
  `attention.visible`, the softmax `attention.softmax`, the loop over rows `attention.rows`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K).
    value: `[B, S, K, V]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`, added by clipped distance, see `attention.relative`.
    relative_keys: `[2L+1, H]`, Shaw's keys by clipped distance, or
      `[N, 2L+1, H]`, a table for each head (Transformer-XL).
    sinks: `[N]`, one more logit for each head, which takes weight and gives no
      value (gpt-oss).
    logits_soft_cap: c; the scaled products of query and key become
      c · tanh(x / c), ahead of masks, biases and tables (Gemma 2).
    log_forget: `[B, T, N]`, logarithms of forget gates, at most 0: Σ log f_u over
      s < u ≤ t is added to the logits (FoX). For causal calls with T = S. The gate
      of a position that a mask of one row hides counts as 1.
    score_mod: `(score, b, n, t, s) -> score` of indices that broadcast, as in
      FlexAttention; it takes the logits ahead of `bias` and `log_forget`.
    mask_mod: `(b, n, t, s) -> bool`, True = attend, in addition to `mask`.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: C, rows that are computed at the same time; None is the choice
      of `attention.rows.by_rows`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together.

  Cost: time T·S·N·(H+V), three quarters of it for a causal call of several
  blocks; memory B·N·C·S float32, because whole rows are computed, C queries at
  a time, and again in the backward where C < T. The function can be
  differentiated any number of times, forward and reverse.

  Departs from its paper in cases that the paper does not have: a query that
  sees no key, key heads that several query heads share, biases by pair or
  distance.

  Papers: Attention is all you need, section 3.2.1, arXiv:1706.03762. Sinks: gpt-oss,
  arXiv:2508.10925. Soft caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting
  transformer, arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  arguments.check_pairs(
    query,
    key,
    value,
    mask=mask,
    bias=bias,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  arguments.check_logit_options(
    query,
    key,
    is_causal,
    sinks=sinks,
    logits_soft_cap=logits_soft_cap,
    log_forget=log_forget,
  )
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  batch, _, num_heads, head_dim = query.shape
  source_length, num_kv_heads = key.shape[1:3]
  tables = relative.check(relative_bias, relative_keys, query)
  keys, values = (layout.heads_first(x, num_kv_heads) for x in (key, value))
  scale = arguments.softmax_scale(scale, head_dim)
  visible = visible_from_options(
    query,
    key,
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )

  exact = jnp.promote_types(query.dtype, jnp.float32)
  forgotten = forgetting.of_call(log_forget, mask)
  has_pairs = any(
    x is not None for x in (sinks, forgotten, score_mod, dropout_rate or None)
  )

  def attend(query, bias, start, seen):
    rows = query.shape[1]
    x = layout.heads_first(query, num_kv_heads)
    # Scaling the queries is less work than scaling the logits, but costs digits
    # in half precision.
    early, late = (scale, 1.0) if x.dtype == exact else (1.0, scale)
    seen_keys, seen_values = keys[:, :, :seen], values[:, :, :seen]
    logits = layout.dot("bkqh,bksh->bkqs", x * early, seen_keys, exact) * late
    if logits_soft_cap is not None:
      logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if tables.given:
      logits += relative.logits(tables, x, -start, rows, seen, scale)
    allowed = visible.block(start, rows, 0, seen)
    if score_mod is not None or mask_mod is not None:
      shape = (batch, num_heads, rows, seen)
      indices = mods_lib.indices(shape, start, 0)
      if score_mod is not None:
        logits = jnp.asarray(score_mod(logits.reshape(shape), *indices), exact)
      if mask_mod is not None:
        shown = jnp.broadcast_to(mods_lib.as_bool(mask_mod(*indices)), shape)
        allowed = shown if allowed is None else allowed & shown
    # XLA writes the softmax over logits that keep the shape of their product.
    if has_pairs or allowed is not None or bias is not None:
      logits = logits.reshape(batch, num_heads, rows, seen)
    if bias is not None:
      logits += bias.astype(exact)
    if forgotten is not None:
      of_query = layout.cut(forgotten, start, rows)
      logits += forgetting.between(of_query, forgotten[:, :seen]).astype(exact)
    weights = masked_softmax(logits, allowed, _of_rows(sinks, logits))
    if dropout_rate:
      weights *= dropout.of_pairs(
        dropout_rng,
        dropout_rate,
        batch,
        num_heads,
        start + jnp.arange(rows),
        jnp.arange(seen),
      )
    weights = weights.astype(value.dtype).reshape(*x.shape[:3], seen)
    out = layout.dot("bkqs,bksv->bkqv", weights, seen_values, exact)
    return layout.heads_last(out, rows).astype(query.dtype)

  return by_rows(attend, query, bias, source_length, block_size, is_causal)


def _of_rows(
  sinks: Float[Array, "N"] | None, logits: Array
) -> Float[Array, "B N C 1"] | None:
  """The sinks as a logit of every row."""
  if sinks is None:
    return None
  x = sinks.astype(logits.dtype)[None, :, None, None]
  return jnp.broadcast_to(x, (*logits.shape[:3], 1))


class DenseCache(NamedTuple):
  """The keys and values of the positions seen so far.

  Attributes:
    key: `[B, S, K, H]`, S = max_length; rows from `index` on are unset.
    value: `[B, S, K, H]`.
    index: `[B]`, the number of positions seen.
    forgotten: Σ log f after each position, where a mechanism forgets.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  index: Int[Array, "B"]
  forgotten: Float[Array, "B S N"] | None = None


def init_cache(
  batch: int,
  max_length: int,
  dims: plug.Dims,
  dtype: Any,
  *,
  forgets: bool = False,
) -> DenseCache:
  """An empty cache for `max_length` positions: B·S·K·(H+V) numbers."""
  shape = (batch, max_length, dims.num_kv_heads)
  forgotten = None
  if forgets:
    forgotten = jnp.zeros((*shape[:2], dims.num_heads), jnp.float32)
  return DenseCache(
    key=jnp.zeros((*shape, dims.head_dim), dtype),
    value=jnp.zeros((*shape, dims.values), dtype),
    index=jnp.zeros((batch,), jnp.int32),
    forgotten=forgotten,
  )


def prefill(
  cache: DenseCache,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
  log_forget: Float[Array, "B P N"] | None = None,
) -> DenseCache:
  """The cache after the first `lengths` of P positions; a copy of these."""
  # What lies beyond an example's length is written over before it is seen.
  forgotten = cache.forgotten
  if forgotten is not None and log_forget is not None:
    after = forgetting.since(log_forget, lengths)
    forgotten = layout.put(forgotten, after, 0)
  return DenseCache(
    layout.put(cache.key, key, 0),
    layout.put(cache.value, value, 0),
    lengths,
    forgotten,
  )


def decode(
  cache: DenseCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  *,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  scale: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  logits_soft_cap: float | None = None,
  log_forget: Float[Array, "B 1 N"] | None = None,
  score_mod: ScoreMod | None = None,
  mask_mod: MaskMod | None = None,
) -> tuple[Float[Array, "B 1 N V"], DenseCache]:
  """One position of the causal call; time S·N·H at every position."""
  slots = jnp.arange(cache.key.shape[1])
  here = slots[None, :] == cache.index[:, None]
  keys = layout.written(cache.key, key, here)
  values = layout.written(cache.value, value, here)
  seen = slots[None, :] <= cache.index[:, None]
  tables = relative.check(relative_bias, relative_keys, query)
  bias = None
  if tables.given:
    distance = (slots[None, :] - cache.index[:, None])[:, None]
    factor = arguments.softmax_scale(scale, query.shape[-1])
    bias = relative.at_position(tables, query, distance, factor)
  forgotten = forgetting.after(cache.forgotten, log_forget, here)
  positions = jnp.broadcast_to(slots[None, :], seen.shape)
  score_mod, mask_mod, bias = mods_lib.at_positions(
    score_mod, mask_mod, bias, cache.index, positions
  )
  out = dense_attention(
    query,
    keys,
    values,
    mask=seen[:, None, None, :],
    bias=forgetting.of_slots(forgotten, bias),
    scale=scale,
    sinks=sinks,
    logits_soft_cap=logits_soft_cap,
    score_mod=score_mod,
    mask_mod=mask_mod,
  )
  return out, DenseCache(keys, values, cache.index + 1, forgotten)


def dense(
  sinks: bool = False,
  logits_soft_cap: float | None = None,
  forget: bool = False,
) -> plug.Attention:
  """The plug of `dense_attention`.

  Args:
    sinks: a logit for each head that takes weight and gives no value, trained:
      `sinks [N]` in `params` (gpt-oss).
    logits_soft_cap: c of c · tanh(x / c); None caps nothing (Gemma 2).
    forget: a forget gate for each head, log σ(x_t · W + b), read from the inputs:
      `forget_kernel [F, N]` and `forget_bias [N]` in `params` (FoX,
      arXiv:2503.02130). The mechanism is then causal only.

  Returns:
    An `Attention` that decodes with a `DenseCache`. Without these it has no
    variables.

  Raises:
    ValueError: an argument is out of range.
  """
  own = own_logits.check(sinks, logits_soft_cap, forget)

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "dense", dense_attention, call, own=own.given
    )
    return dense_attention(query, key, value, **own.options(variables), **call)

  def apply_sharded(
    variables,
    query,
    key,
    value,
    *,
    axis_name,
    implementation: InParts = "ring",
    **call,
  ):
    # `flash` is made of `dense`, and both are the same in parts.
    from attention.sharded import attention_in_parts

    call = arguments.accepted_options(
      "dense", dense_attention, call, own=own.given
    )
    return attention_in_parts(
      query,
      key,
      value,
      axis_name=axis_name,
      implementation=implementation,
      **own.options(variables),
      **call,
    )

  def init_own_cache(variables, batch, max_length, dims, dtype):
    del variables
    return init_cache(batch, max_length, dims, dtype, forgets=forget)

  def decode_own(variables, cache, query, key, value, **call):
    call = {**own.options(variables), **call}
    return decode(cache, query, key, value, **call)

  def prefill_own(
    variables, cache, query, key, value, lengths, *, scale=None, log_forget=None
  ):
    del variables, query, scale  # Keys are kept as they are.
    return prefill(cache, key, value, lengths, log_forget)

  return plug.Attention(
    init=own.init,
    apply=apply,
    init_cache=init_own_cache,
    decode=decode_own,
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
    prefill=prefill_own,
    apply_sharded=apply_sharded if own.is_plain else None,
    causal_only=forget,
    gates=own.gates,
  )
