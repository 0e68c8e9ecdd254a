"""Dense softmax attention (Vaswani et al., 2017)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.core import dropout, layout, relative, visibility
from attention.core.implementations import InParts
from attention.core.rows import by_rows
from attention.core.softmax import masked_softmax


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
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Every query attends to every key: softmax(scale · Q Kᵀ + bias) V.

  Logits, softmax and normaliser are float32, or float64 like the query. Masked
  logits take no part in the softmax. A query that may attend to no key gets
  zeros and passes no gradient.

  This module is the formula for C rows of queries. Which pairs count is
  `core.visibility`, the softmax `core.softmax`, the loop over rows `core.rows`.

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
    relative_bias: `[N, 2L+1]`, added by clipped distance, see `core.relative`.
    relative_keys: `[2L+1, H]`, Shaw's keys by clipped distance, or
      `[N, 2L+1, H]`, a table for each head (Transformer-XL).
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: C, rows that are computed at the same time; None is the choice
      of `core.rows.by_rows`.

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

  Paper: Attention is all you need, section 3.2.1, arXiv:1706.03762.
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
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  batch, _, num_heads, head_dim = query.shape
  source_length, num_kv_heads = key.shape[1:3]
  tables = relative.check(relative_bias, relative_keys, query)
  keys, values = (layout.heads_first(x, num_kv_heads) for x in (key, value))
  scale = arguments.softmax_scale(scale, head_dim)
  sees = visibility.of_call(mask, query_segment_ids, key_segment_ids, is_causal)

  exact = jnp.promote_types(query.dtype, jnp.float32)

  def attend(query, bias, start, seen):
    rows = query.shape[1]
    x = layout.heads_first(query, num_kv_heads)
    # Scaling the queries is less work than scaling the logits, but costs digits
    # in half precision.
    early, late = (scale, 1.0) if x.dtype == exact else (1.0, scale)
    seen_keys, seen_values = keys[:, :, :seen], values[:, :, :seen]
    logits = layout.dot("bkqh,bksh->bkqs", x * early, seen_keys, exact) * late
    if tables.given:
      logits += relative.logits(tables, x, -start, rows, seen, scale)
    allowed = sees.block(start, rows, 0, seen)
    # XLA writes the softmax over logits that keep the shape of their product.
    if allowed is not None or bias is not None or dropout_rate:
      logits = logits.reshape(batch, num_heads, rows, seen)
    if bias is not None:
      logits += bias.astype(exact)
    weights = masked_softmax(logits, allowed)
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


class DenseCache(NamedTuple):
  """The keys and values of the positions seen so far.

  Attributes:
    key: `[B, S, K, H]`, S = max_length; rows from `index` on are unset.
    value: `[B, S, K, H]`.
    index: `[B]`, the number of positions seen.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  index: Int[Array, "B"]


def init_cache(
  variables: plug.Variables,
  batch: int,
  max_length: int,
  dims: plug.Dims,
  dtype: Any,
) -> DenseCache:
  """An empty cache for `max_length` positions: 2·B·S·K·H numbers."""
  del variables
  shape = (batch, max_length, dims.num_kv_heads, dims.head_dim)
  return DenseCache(
    key=jnp.zeros(shape, dtype),
    value=jnp.zeros(shape, dtype),
    index=jnp.zeros((batch,), jnp.int32),
  )


def prefill(
  variables: plug.Variables,
  cache: DenseCache,
  query: Float[Array, "B P N H"],
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K H"],
  lengths: Int[Array, "B"],
  *,
  scale: float | None = None,
) -> DenseCache:
  """The cache after the first `lengths` of P positions; a copy of these."""
  del variables, query, scale  # Keys are kept as they are.
  # What lies beyond an example's length is written over before it is seen.
  return DenseCache(
    layout.put(cache.key, key, 0), layout.put(cache.value, value, 0), lengths
  )


def decode(
  variables: plug.Variables,
  cache: DenseCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K H"],
  *,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  scale: float | None = None,
) -> tuple[Float[Array, "B 1 N H"], DenseCache]:
  """One position of the causal call; time S·N·H at every position."""
  del variables
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
  out = dense_attention(
    query,
    keys,
    values,
    mask=seen[:, None, None, :],
    bias=bias,
    scale=scale,
  )
  return out, DenseCache(keys, values, cache.index + 1)


def dense() -> plug.Attention:
  """The plug of `dense_attention`; it has no hyperparameters.

  Returns:
    An `Attention` without variables that decodes with a `DenseCache`.
  """

  def apply(variables, query, key, value, **call):
    del variables
    call = arguments.accepted_options("dense", dense_attention, call)
    return dense_attention(query, key, value, **call)

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
    from attention.flash import parts

    del variables
    call = arguments.accepted_options("dense", dense_attention, call)
    return parts.attention_in_parts(
      query,
      key,
      value,
      axis_name=axis_name,
      implementation=implementation,
      **call,
    )

  return plug.Attention(
    init=plug.no_variables,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    supports=frozenset(
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
    prefill=prefill,
    apply_sharded=apply_sharded,
  )
