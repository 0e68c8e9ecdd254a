"""Dense softmax attention (Vaswani et al., 2017)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, blocks, dense_rows, plug, relative
from attention.softmax import masked_softmax


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
  relative_keys: Float[Array, "E H"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> Float[Array, "B T N V"]:
  """Every query attends to every key: softmax(scale · Q Kᵀ + bias) V.

  Logits, softmax and normaliser are float32 whatever the dtype of the inputs.
  Masked logits take no part in the softmax; a query with nothing to attend to
  gets zeros and passes no gradient.

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
    relative_bias: `[N, 2L+1]`, added by clipped distance, see `relative`.
    relative_keys: `[2L+1, H]`, Shaw's keys by clipped distance.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together.

  Cost: time T·S·N·(H+V); memory B·N·C·S float32, where C is T up to 512 and 256
  beyond, as whole rows are computed in blocks (`dense_rows`). The backward makes
  them again beyond 512. Differentiable any number of times, forward and reverse.

  Departs from its paper in what the paper does not have: a query that sees
  nothing, key heads that several query heads share, biases by pair or distance.

  Paper: Attention is all you need, section 3.2.1, arXiv:1706.03762.
  """
  arguments.check_qkv(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  source_length, num_kv_heads = key.shape[1:3]
  shape = (batch, num_heads, length, source_length)
  arguments.check_mask(mask, shape)
  arguments.check_segment_ids(query_segment_ids, key_segment_ids, query, key)
  if bias is not None:
    arguments.check_broadcast("bias", bias, shape)
  arguments.check_dropout(dropout_rate, dropout_rng)
  tables = relative.check(relative_bias, relative_keys, query)
  keys, values = (blocks.heads_first(x, num_kv_heads) for x in (key, value))
  scale = arguments.softmax_scale(scale, head_dim)

  def attend(rows, i):
    start = i * dense_rows.ROWS
    size = rows.query.shape[1]
    shape = (batch, num_heads, size, source_length)
    # The N/K query heads that share a key head become rows of one product.
    x = blocks.heads_first(rows.query, num_kv_heads)
    # To scale the logits is a pass over them, a tenth of the time at T 4096; in
    # half precision it is done, or the queries would lose digits.
    early, late = (scale, 1.0) if x.dtype == jnp.float32 else (1.0, scale)
    logits = blocks.dot("AQH,ASH->AQS", x * early, keys) * late
    if tables.given:
      logits += relative.logits(tables, x, -start, size, source_length, scale)
    allowed = _allowed(rows, start, is_causal, key_segment_ids, source_length)
    # Where nothing is known by head, logits keep their shape: then XLA writes all
    # up to the weights over them, which takes 0.9 of the time.
    if allowed is not None or rows.bias is not None or dropout_rate:
      logits = logits.reshape(shape)
    if rows.bias is not None:
      logits += rows.bias.astype(jnp.float32)
    weights = masked_softmax(logits, allowed)
    if dropout_rate:
      weights *= blocks.kept(dropout_rng, dropout_rate, shape, i)
    weights = weights.astype(value.dtype).reshape(*x.shape[:2], source_length)
    out = blocks.dot("AQS,ASV->AQV", weights, values)
    return blocks.heads_last(out, batch, size).astype(query.dtype)

  return dense_rows.by_blocks(
    attend, dense_rows.Rows(query, mask, bias, query_segment_ids)
  )


def _allowed(
  rows: dense_rows.Rows,
  start: Array | int,
  is_causal: bool,
  key_segment_ids: Int[Array, "B S"] | None,
  source_length: int,
) -> Bool[Array, "..."] | None:
  """The conjunction of all that forbids, or None where nothing does."""
  allowed = rows.mask
  if is_causal:
    positions = start + jnp.arange(rows.query.shape[1])
    causal = jnp.arange(source_length)[None] <= positions[:, None]
    causal = causal[None, None]
    allowed = causal if allowed is None else allowed & causal
  if rows.segments is not None and key_segment_ids is not None:
    same = rows.segments[:, :, None] == key_segment_ids[:, None, :]
    allowed = same[:, None] if allowed is None else allowed & same[:, None]
  return allowed


class DenseCache(NamedTuple):
  """Keys and values seen so far.

  Attributes:
    key: `[B, S, K, H]`, S = max_length; rows from `index` on are unset.
    value: `[B, S, K, H]`.
    index: `[B]`, the number of positions seen.
  """

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K H"]
  index: Int[Array, "B"]


def init_dense_cache(
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


def decode_dense(
  variables: plug.Variables,
  cache: DenseCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K H"],
  *,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "E H"] | None = None,
  scale: float | None = None,
) -> tuple[Float[Array, "B 1 N H"], DenseCache]:
  """One position of the causal call; time S·N·H whatever the position."""
  del variables
  # A comparison with the positions, not a scatter: it fuses, and every example
  # may stand at another position.
  slots = jnp.arange(cache.key.shape[1])
  here = (slots[None, :] == cache.index[:, None])[:, :, None, None]
  keys = jnp.where(here, key.astype(cache.key.dtype), cache.key)
  values = jnp.where(here, value.astype(cache.value.dtype), cache.value)
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
  """The plug of `dense_attention`; it has no hyperparameters."""

  def apply(variables, query, key, value, **call):
    del variables
    call = arguments.accepted_options("dense", dense_attention, call)
    return dense_attention(query, key, value, **call)

  return plug.Attention(
    init=plug.no_variables,
    apply=apply,
    init_cache=init_dense_cache,
    decode=decode_dense,
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
      }
    ),
    approximates="dense",
  )
