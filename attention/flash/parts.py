"""Exact attention of a sequence in parts, one a device: dense, flash and Luong's."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from attention import arguments
from attention.core import platform, relative, ring
from attention.core.tile import Product
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
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`flash_attention` of the whole, of which each device has a part.

  Keys and values go round the ring of `core.ring`. T and S are those of a part.

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
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: a mask that varies along queries, a bias, or dropout; a causal
      call with another length of keys.

  Cost: time T·(D·S)·N·(H+V) on each of D devices, the last of a causal call;
  memory of `flash_attention` on parts. D − 1 parts of keys and values cross.

  Paper: Ring attention, arXiv:2310.01889.
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
  query, scale = arguments.scaled_query(query, scale)
  source = blocks(
    query,
    key,
    Product(scale),
    is_causal,
    by_data=(mask is not None or query_segment_ids is not None),
  )
  hidden = ring.Hidden(mask, query_segment_ids, key_segment_ids)
  return ring.attend(
    source, axis_name, query, Arrays(key, value), tables, hidden
  )


def blocks(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  score: Any,
  is_causal: bool,
  *,
  by_data: bool,
) -> Blocks:
  """How the tiles of a pair of parts are cut."""
  batch, length, num_heads, _ = query.shape
  source_length, kv_heads = key.shape[1:3]
  rows, width = platform.block(
    4 * batch * num_heads, platform.LEAST_ROWS, platform.LEAST_ROWS
  )
  return Blocks(
    rows=min(rows, length),
    width=min(width, source_length),
    kv_heads=kv_heads,
    num_heads=num_heads,
    score=score,
    by_data=by_data,
    source_length=source_length,
    is_causal=is_causal,
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
