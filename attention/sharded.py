"""Attention of a sequence in parts, one part a device, inside `jax.shard_map`.

Exact attention sends keys and values round a ring (`attention.ring`), or exchanges
heads for positions. Queries that all devices have, such as global tokens, need one sum
over the devices, and a window the positions that it reaches beyond a part.

Paper of all_to_all: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, relative
from attention.implementations import InParts
from attention.logits import Logits
from attention.loop import attend
from attention.ring import ring
from attention.visible import visible_from_options


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
  """Exact attention of the whole, of which each device has a part.

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
    implementation: 'ring', or 'balanced', for an even T, in which all devices have
      the same work in a causal call, or 'all_to_all': each device gets all positions
      of N/D heads, and sends the results back; for D that divides K.
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
  """
  options = {
    "mask": mask,
    "is_causal": is_causal,
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
  }
  check(query, key, value, **options, others=others)
  relative.check(relative_bias, relative_keys, query)
  arguments.check_dropout(dropout_rate, dropout_rng)
  logits = Logits(
    scale=scale, relative_bias=relative_bias, relative_keys=relative_keys
  )
  if implementation == "all_to_all":
    if dropout_rate:
      raise ValueError(
        "dropout_rate: expected 0.0 with 'all_to_all', whose devices draw for "
        f"some heads alone, got {dropout_rate}; use 'ring'"
      )
    return _by_heads(query, key, value, axis_name, options, logits)
  return ring(
    query,
    key,
    value,
    axis_name=axis_name,
    logits=logits,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    is_balanced=implementation == "balanced",
    **options,
  )[0]


def _by_heads(query, key, value, axis_name, options, logits):
  """All positions of some heads, instead of some positions of all heads."""
  size = jax.lax.axis_size(axis_name)
  num_heads, kv_heads = query.shape[2], key.shape[2]
  if kv_heads % size:
    raise ValueError(
      f"implementation: 'all_to_all' gives each of {size} devices a share of "
      f"the heads, got {num_heads} heads of queries and {kv_heads} of keys; use "
      "'ring'"
    )
  share = num_heads // size
  mine = jax.lax.axis_index(axis_name) * share

  def to_heads(x):
    return jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True)

  def whole(x, axis):
    if x is None:
      return None
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

  def of_heads(table, has_heads=True):
    if table is None or not has_heads:
      return table
    return jax.lax.dynamic_slice_in_dim(table, mine, share)

  keys = logits.relative_keys
  logits = Logits(
    scale=logits.scale,
    relative_bias=of_heads(logits.relative_bias),
    relative_keys=of_heads(keys, keys is not None and keys.ndim == 3),
  )
  query, key, value = map(to_heads, (query, key, value))
  visible = visible_from_options(
    query,
    key,
    mask=whole(options["mask"], 3),
    is_causal=options["is_causal"],
    query_segment_ids=whole(options["query_segment_ids"], 1),
    key_segment_ids=whole(options["key_segment_ids"], 1),
  )
  out, _ = attend(query, key, value, visible, logits)
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
  """Exact attention of queries that all devices have to keys in parts.

  Landmarks, global tokens and global blocks are such queries.

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
  visible = visible_from_options(
    query,
    key,
    mask=mask,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  out, lse = attend(query, key, value, visible, Logits(scale=scale))
  lse = lse[..., None]
  largest = jax.lax.pmax(jax.lax.stop_gradient(lse), axis_name)
  share = jnp.exp(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
  sums = jnp.concatenate([share * out.astype(jnp.float32), share], axis=-1)
  sums = jax.lax.psum(sums, axis_name)
  total = sums[..., -1:]
  total = jnp.where(total == 0.0, 1.0, total)
  return (sums[..., :-1] / total).astype(query.dtype)


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
    is_off = name == "dropout_rng" or option is None or option is False
    if not is_off and not (name == "dropout_rate" and option == 0.0):
      raise ValueError(
        f"{name}: expected none where a sequence lies in parts; attend to the "
        "whole, with one device for a sequence"
      )
