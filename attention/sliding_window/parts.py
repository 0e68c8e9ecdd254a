"""A window over a sequence in parts, one a device: neighbours send a halo."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.flash import parts


def attention_in_parts(
  function: Callable[..., Array],
  reach: tuple[int, int],
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  is_causal: bool = False,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`sliding_window_attention` of the whole, of which each device has a part.

  Every device gets the keys that its window reaches beyond its own part, with
  their mask and segment ids, and attends to the longer stretch.

  Args:
    function: `sliding_window_attention` with its window.
    reach: L and R, positions that the window reaches before and behind a query.
    query: this device's queries, T of them, which follow those of the device
      before; `key` and `value` are of the same positions.
    axis_name: of the devices, inside `jax.shard_map`.
    mask: this device's part of a key mask; segment ids likewise.
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: keys of other positions than the queries', a mask that varies
      along queries, global tokens, or dropout.

  Cost: that of the window on T + L + R positions. What crosses is L + R positions
  of keys and values, from ⌈L/T⌉ and ⌈R/T⌉ devices, at any length.
  """
  parts.check(
    query,
    key,
    value,
    mask,
    is_causal,
    query_segment_ids,
    key_segment_ids,
    others,
  )
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the positions of the queries, {length} on a device, got "
      f"{key.shape[1]}; a window over a sequence in parts is of one sequence"
    )
  size = jax.lax.axis_size(axis_name)
  # Farther devices there are none.
  left, right = (min(side, (size - 1) * length) for side in reach)
  if is_causal:
    right = 0

  def reached(x: Shaped[Array, "B T *A"]) -> Shaped[Array, "B U *A"]:
    """With what is before and behind; 0 where there is nothing."""
    before = _of_others(x, left, 1, axis_name, size)
    behind = _of_others(x, right, -1, axis_name, size)
    return jnp.concatenate([*reversed(before), x, *behind], axis=1)

  def padded(x):
    widths = [(0, 0)] * x.ndim
    widths[1] = (left, right)
    return jnp.pad(x, widths)

  keep = jnp.ones((1, length), bool) if mask is None else mask[:, 0, 0]
  ids = {}
  if query_segment_ids is not None and key_segment_ids is not None:
    ids["query_segment_ids"] = padded(query_segment_ids)
    ids["key_segment_ids"] = reached(key_segment_ids)
  out = function(
    padded(query),
    reached(key),
    reached(value),
    mask=reached(keep)[:, None, None],
    is_causal=is_causal,
    scale=scale,
    relative_bias=relative_bias,
    relative_keys=relative_keys,
    **ids,
  )
  return out[:, left : left + length]


def _of_others(
  x: Shaped[Array, "B T *A"],
  width: int,
  direction: int,
  axis_name: str,
  size: int,
) -> list[Shaped[Array, "B _ *A"]]:
  """The nearest `width` positions of the devices on one side, nearest first.

  Args:
    x: this device's.
    width: at most those of all other devices.
    direction: 1 for the devices before this one, −1 for those behind it.
    axis_name: of the devices.
    size: D.
  """
  found, hop = [], 0
  while width > 0:
    hop += 1
    taken = min(width, x.shape[1])
    sent = x[:, -taken:] if direction == 1 else x[:, :taken]
    pairs = [
      (i, i + direction * hop)
      for i in range(size)
      if 0 <= i + direction * hop < size
    ]
    found.append(jax.lax.ppermute(sent, axis_name, pairs))
    width -= taken
  return found
