"""Exact attention of a sequence in parts, one a device: dense, flash and Luong's."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from attention import arguments
from attention.core import (
  balanced_ring,
  few_queries,
  platform,
  relative,
  ring,
  visibility,
)
from attention.core.implementations import InParts
from attention.core.relative import Relative
from attention.core.ring import Limits
from attention.core.tile import Product
from attention.flash.attention import flash_attention
from attention.flash.blocks import Arrays, Blocks


def attention_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  axis_name: str,
  mask: Bool[Array, "#B 1 1 S"] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  implementation: InParts = "ring",
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`flash_attention` of the whole, of which each device has a part.

  T and S are those of a part.

  Args:
    query: this device's queries, which follow those of the device before.
    key: this device's keys.
    value: their values.
    axis_name: of the devices, inside `jax.shard_map`.
    mask: this device's part of a key mask.
    is_causal: queries see no later keys; for parts of one length.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: of this device's queries.
    key_segment_ids: of its keys.
    relative_bias: by distance in the whole, the same on every device.
    relative_keys: likewise.
    dropout_rate: share of weights set to zero, the same ones as in the whole.
    dropout_rng: the same on every device.
    implementation: 'ring': keys and values go round, `core.ring`. 'balanced': so
      they do, and in a causal call all devices work alike, `core.balanced_ring`;
      for an even T. 'all_to_all': each device gets all positions of N/D heads,
      and sends the results back; for D that divides K.
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: a mask that varies along queries, or a bias; a causal
      call with another length of keys; an implementation that cannot serve.

  Cost: time T·(D·S)·N·(H+V) on each of D devices, in a causal call half of it,
  but with 'ring' for the last device; memory of `flash_attention` on parts, with
  'all_to_all' that of N/D heads of the whole. What crosses is D − 1 parts of keys
  and values; balanced one part more of all arrays; with 'all_to_all' (D − 1)/D of this
  device's queries, keys, values and results.

  Paper: Ring attention, arXiv:2310.01889; all_to_all: DeepSpeed-Ulysses,
  arXiv:2309.14509.
  """
  check(
    query,
    key,
    value,
    mask,
    is_causal,
    query_segment_ids,
    key_segment_ids,
    others,
  )
  tables = relative.check(relative_bias, relative_keys, query)
  arguments.check_dropout(dropout_rate, dropout_rng)
  rng = dropout_rng if dropout_rate else None
  hidden = ring.Hidden(mask, query_segment_ids, key_segment_ids, rng)
  if implementation == "all_to_all":
    if dropout_rate:
      raise ValueError(
        "dropout_rate: expected 0.0 with 'all_to_all', whose devices draw for "
        f"some heads alone, got {dropout_rate}; use 'ring'"
      )
    return _by_heads(
      query, key, value, axis_name, is_causal, scale, tables, hidden
    )
  query, scale = arguments.scaled_query(query, scale)
  first, of_first, attend = query, key, ring.attend
  is_shared = is_causal and jax.lax.axis_size(axis_name) > 1
  if implementation == "balanced" and is_shared:
    if query.shape[1] % 2:
      raise ValueError(
        "implementation: 'balanced' needs an even number of positions on a "
        f"device, got {query.shape[1]}; use 'ring'"
      )
    attend = balanced_ring.attend
    half = query.shape[1] // 2
    first, of_first = query[:, :half], key[:, :half]
  source = blocks(
    first,
    of_first,
    Product(scale),
    is_causal,
    by_data=(mask is not None or query_segment_ids is not None),
    dropout_rate=dropout_rate,
  )
  return attend(source, axis_name, query, Arrays(key, value), tables, hidden)


def _by_heads(query, key, value, axis_name, is_causal, scale, tables, hidden):
  """All positions of some heads, instead of some positions of all heads."""
  size = jax.lax.axis_size(axis_name)
  num_heads, kv_heads = query.shape[2], key.shape[2]
  if kv_heads % size:
    raise ValueError(
      f"implementation: 'all_to_all' gives each of {size} devices a share of "
      f"the heads, got {num_heads} heads of queries and {kv_heads} of keys; use "
      "'ring'"
    )

  def to_heads(x):
    return jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True)

  def whole(x, axis):
    if x is None:
      return None
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

  share = num_heads // size
  mine = jax.lax.axis_index(axis_name) * share

  def of_heads(table):
    """This device's heads of a table for each head."""
    return jax.lax.dynamic_slice_in_dim(table, mine, share)

  bias, keys, *_ = tables
  bias = bias if bias is None else of_heads(bias)
  keys = of_heads(keys) if keys is not None and keys.ndim == 3 else keys
  out = flash_attention(
    *map(to_heads, (query, key, value)),
    mask=whole(hidden.mask, 3),
    is_causal=is_causal,
    scale=scale,
    query_segment_ids=whole(hidden.of_query, 1),
    key_segment_ids=whole(hidden.of_key, 1),
    relative_bias=bias,
    relative_keys=keys,
    implementation="xla",
  )
  return jax.lax.all_to_all(out, axis_name, 1, 2, tiled=True)


def attention_of_few(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  axis_name: str,
  mask: Bool[Array, "#B #N #T S"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T N V"]:
  """`flash_attention` of queries that all devices have to keys in parts.

  Args:
    query: T queries, the same on every device.
    key: this device's S keys.
    value: their values.
    axis_name: of the devices, inside `jax.shard_map`.
    mask: of this device's keys.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: the same on every device.
    key_segment_ids: of this device's keys.

  Returns:
    `[B, T, N, V]`, the same on every device.

  Cost: time T·S·N·(H+V) on each device; two sums of T·N·V numbers cross.
  """
  query, scale = arguments.scaled_query(query, scale)
  sees = visibility.of_call(mask, query_segment_ids, key_segment_ids, False)
  source = blocks(query, key, Product(scale), False, by_data=sees.by_data)
  return few_queries.attend(
    source, axis_name, query, Arrays(key, value), Relative(), Limits(sees)
  )


def blocks(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  score: Any,
  is_causal: bool,
  *,
  by_data: bool,
  dropout_rate: float = 0.0,
) -> Blocks:
  """How the tiles of a pair of parts are cut."""
  batch, length, num_heads, _ = query.shape
  source_length, kv_heads = key.shape[1:3]
  rows, width = platform.block(
    4 * batch * num_heads,
    platform.LEAST_ROWS,
    platform.LEAST_ROWS,
    length,
    source_length,
  )
  return Blocks(
    rows=rows,
    width=width,
    kv_heads=kv_heads,
    num_heads=num_heads,
    score=score,
    by_data=by_data,
    source_length=source_length,
    is_causal=is_causal,
    dropout_rate=dropout_rate,
  )


def check(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  mask: Bool[Array, "..."] | None,
  is_causal: bool,
  query_segment_ids: Int[Array, "B T"] | None,
  key_segment_ids: Int[Array, "B S"] | None,
  others: Mapping[str, Any],
) -> None:
  """Checks the arguments of attention to a sequence in parts.

  Raises:
    ValueError: they do not fit together, the mask varies along queries, a causal
      call has two lengths, or `others` has an option that has no form in parts.
  """
  arguments.check_pairs(
    query,
    key,
    value,
    mask=mask,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  arguments.key_mask(
    mask, query, key, "a sequence in parts has no place for a T×S mask"
  )
  if is_causal and query.shape[1] != key.shape[1]:
    raise ValueError(
      "is_causal: expected parts of one length, got "
      f"{query.shape[1]} queries and {key.shape[1]} keys on a device"
    )
  for name, option in others.items():
    # The rate says whether there is dropout.
    is_off = name == "dropout_rng" or option is None
    if not is_off and not (name == "dropout_rate" and option == 0.0):
      raise ValueError(
        f"{name}: expected none where a sequence lies in parts; attend to the "
        "whole, with one device for a sequence"
      )
