"""A window over a sequence in parts, one a device: neighbours send what it reaches.

Every device gets the keys that its window reaches beyond its own part, with their
mask and segment ids, and attends to the longer stretch. Of global tokens, every
device has queries, keys and values by one sum over the devices; as queries they
attend to the keys of all by `sharded.attention_of_few`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import halo, relative, sharded
from attention.logits import Logits
from attention.loop import attend, merge
from attention.visible import Visible
from attention.windows import Tokens, Window


def window_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  near: Window,
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  global_indices: Int[Array, "B G"] | None = None,
  global_qkv: tuple[Array, Array, Array] | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`sliding_window_attention` of the whole, of which each device has a part.

  Args:
    query: this device's queries, T of them, which follow those of the device
      before; `key` and `value` are of the same positions.
    axis_name: of the devices, inside `jax.shard_map`.
    near: the window.
    mask: this device's part of a key mask; segment ids likewise.
    global_indices: positions in the whole, the same on every device.
    global_qkv: this device's part of each.
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: keys of other positions than the queries', a mask that varies
      along queries, or dropout.

  Cost: that of the window on T + L + R positions, which it reaches before and
  behind. What crosses is L + R positions of keys and values, from ⌈L/T⌉ and ⌈R/T⌉
  devices, and of G global tokens queries, keys, values and results.
  """
  ids = query_segment_ids, key_segment_ids
  sharded.check(query, key, value, mask, is_causal, *ids, others)
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the positions of the queries, {length} on a device, got "
      f"{key.shape[1]}; a window over a sequence in parts is of one sequence"
    )
  relative.check(relative_bias, relative_keys, query)
  logits = Logits(
    scale=scale, relative_bias=relative_bias, relative_keys=relative_keys
  )
  # Farther devices there are none.
  elsewhere = (jax.lax.axis_size(axis_name) - 1) * length
  sides = (near.sides[0], 0 if is_causal else near.sides[1])
  near = near._replace(sides=sides)
  left, right = (min(side * max(near.dilations), elsewhere) for side in sides)

  def reached(x: Shaped[Array, "B T *A"]) -> Shaped[Array, "B U *A"]:
    return halo.reached(x, left, right, axis_name)

  def padded(x):
    widths = [(0, 0)] * x.ndim
    widths[1] = (left, right)
    return jnp.pad(x, widths)

  keep = jnp.ones((1, length), bool) if mask is None else mask[:, 0, 0]
  keep = jnp.broadcast_to(keep, key.shape[:2])
  near_keys, segments = keep, ()
  if query_segment_ids is not None and key_segment_ids is not None:
    segments = ((padded(query_segment_ids), reached(key_segment_ids)),)
  tokens = None
  if global_indices is not None and global_indices.shape[1]:
    tokens = _here(global_indices, length, axis_name)
    near_keys = keep & tokens.others()
  visible = Visible(
    masks=(reached(near_keys)[:, None, None],), segments=segments
  )
  out, lse = (
    x[:, left : left + length]
    for x in near(padded(query), reached(key), reached(value), visible, logits)
  )
  if tokens is None:
    return out
  # A token that no query sees may hold anything.
  kept = tokens.rows(keep)[:, :, None, None]
  seen = tokens.seen(keep, query_segment_ids, is_causal)
  out, _ = merge(
    (out, lse),
    attend(
      query,
      jnp.where(kept, tokens.rows(key), 0),
      jnp.where(kept, tokens.rows(value), 0),
      Visible(masks=(seen[:, None],)),
      logits,
    ),
  )
  query, key, value = global_qkv or (query, key, value)
  keep_all = Visible(masks=(keep[:, None, None],))
  rows = sharded.attention_of_few(
    tokens.rows(query),
    keep_all.readable(key),
    keep_all.readable(value),
    axis_name=axis_name,
    mask=tokens.see(keep, key_segment_ids, is_causal),
    scale=scale,
  )
  return tokens.replace(out, rows)


class _Here(NamedTuple):
  """The global tokens of the whole as a device sees them.

  Attributes:
    tokens: positions in the whole.
    slots: positions in this device's part, which those of others are outside of.
    of_own: this device's positions in the whole.
    axis_name: of the devices.
  """

  tokens: Tokens
  slots: Int[Array, "B G"]
  of_own: Int[Array, "T"]
  axis_name: str

  @property
  def _are_mine(self) -> Bool[Array, "B G"]:
    inside = (self.slots >= 0) & (self.slots < len(self.of_own))
    return inside & self.tokens.valid

  def rows(self, x: Shaped[Array, "B T *A"]) -> Shaped[Array, "B G *A"]:
    """What the devices have at the tokens; zeros where there is none."""
    inside = jnp.clip(self.slots, 0, len(self.of_own) - 1)
    found = jax.vmap(lambda rows, i: rows[i])(x, inside)
    mine = self._are_mine.reshape(*self.slots.shape, *[1] * (x.ndim - 2))
    number = found.astype(jnp.int32) if x.dtype == bool else found
    total = jax.lax.psum(jnp.where(mine, number, 0), self.axis_name)
    return total.astype(x.dtype)

  def others(self) -> Bool[Array, "B T"]:
    """False at the tokens among this device's positions."""
    return Tokens(self.slots, self.tokens.valid).others(len(self.of_own))

  def seen(
    self,
    keep: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    is_causal: bool,
  ) -> Bool[Array, "B T G"]:
    """Which tokens, as keys, this device's queries see."""
    found = (self.rows(keep) & self.tokens.valid)[:, None, :]
    if is_causal:
      found &= self.tokens.index[:, None, :] <= self.of_own[None, :, None]
    if segment_ids is not None:
      found &= segment_ids[:, :, None] == self.rows(segment_ids)[:, None, :]
    return jnp.broadcast_to(found, (*keep.shape, self.slots.shape[1]))

  def see(
    self,
    keep: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    is_causal: bool,
  ) -> Bool[Array, "B 1 G T"]:
    """Which of this device's keys the tokens, as queries, see."""
    found = keep[:, None, :]
    if is_causal:
      found = found & (self.of_own[None, None] <= self.tokens.index[:, :, None])
    if segment_ids is not None:
      found = found & (
        self.rows(segment_ids)[:, :, None] == segment_ids[:, None, :]
      )
    return found[:, None]

  def replace(
    self, out: Float[Array, "B T N V"], rows: Float[Array, "B G N V"]
  ) -> Float[Array, "B T N V"]:
    """`out` with the rows of this device's tokens."""
    slots = jnp.where(self._are_mine, self.slots, out.shape[1])
    return jax.vmap(lambda old, slot, new: old.at[slot].set(new, mode="drop"))(
      out, slots, rows
    )


def _here(indices: Int[Array, "B G"], length: int, axis_name: str) -> _Here:
  """The tokens of a call on this device, which has `length` positions."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  tokens = Tokens.of(indices, size * length)
  first = rank * length
  return _Here(
    tokens, tokens.index - first, first + jnp.arange(length), axis_name
  )
