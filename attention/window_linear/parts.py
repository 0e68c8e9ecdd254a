"""Window and linear attention over a sequence in parts, one a device.

The near keys of a device's queries are its own and W before them, a halo. Query t
meets far keys up to t − W: moved by W positions, the keys are a sequence in parts
like that of the queries, whose state before a device is found as in `linear.parts`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments
from attention import sharded as parts
from attention.core import halo, platform, visibility
from attention.linear import causal, hedgehog
from attention.linear.features import FeatureMap, Operands
from attention.linear.parts import state_before
from attention.window_linear import joint
from attention.window_linear.near import window_with_total


def attention_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  mix: Float[Array, "N"],
  window: int,
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`window_linear_attention` of the whole, of which each device has a part.

  Args:
    query: this device's queries, T of them, which follow those of the device
      before; `key` and `value` are of the same positions.
    axis_name: of the devices, inside `jax.shard_map`.
    mask: this device's part of a key mask.
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: keys of other positions than the queries', or a mask that varies
      along queries.

  Cost: that of the whole on T positions. What crosses is W positions of keys and
  values, and log₂ D + 1 states of K·2H·(V+1) numbers.
  """
  parts.check(query, key, value, mask, True, None, None, others)
  scaled, factor = arguments.scaled_query(query, scale)
  length = query.shape[1]
  keep = jnp.ones((1, length), bool) if mask is None else mask[:, 0, 0]
  keep = jnp.broadcast_to(keep, key.shape[:2])

  def reached(x):
    return halo.reached(x, window, 0, axis_name)

  keys, values, kept = reached(key), reached(value), reached(keep)
  near, total = (
    x[:, window:]
    for x in window_with_total(
      jnp.pad(scaled, ((0, 0), (window, 0), (0, 0), (0, 0))),
      keys,
      values,
      visibility.keys(kept),
      sides=(window - 1, 0),
      rows=block_size,
      scale=factor,
    )
  )
  far = None
  if window < length * jax.lax.axis_size(axis_name):
    made_again = jax.checkpoint(
      partial(_far, axis_name=axis_name, block_size=block_size),
      prevent_cse=platform.profile().needs_barriers,
    )
    moved = (x[:, :length] for x in (keys, values, kept))
    far = made_again(query, query_kernel, key_kernel, *moved)
  share = jax.nn.sigmoid(mix.astype(jnp.float32))[None, None, :, None]
  return joint.average(share, near * total, total, far).astype(query.dtype)


def _far(
  query: Float[Array, "B T N H"],
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  keep: Bool[Array, "B T"],
  *,
  axis_name: str,
  block_size: int | None,
) -> Float[Array, "B T N X"]:
  """Numerator and normaliser of the far keys, which lie W positions later here."""
  features = FeatureMap(hedgehog.hedgehog_features, False, 2 * query.shape[-1])
  operands = Operands(
    hedgehog.through(query_kernel, query),
    hedgehog.through(key_kernel, key),
    value,
    (),
  )
  before = state_before(features, operands, keep, axis_name)
  return causal.sums(features, operands, keep, block_size, before)
