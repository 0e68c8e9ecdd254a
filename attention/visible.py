"""Which query may see which key: one value for every reason.

    visible = causal() & window(256, 0) & segments(ids, ids) & key_mask(keep)

A `Visible` is a conjunction of conditions on a pair of query and key. Arrays are
kept as they came, so that a key mask never grows to T×S; causality and windows are
read off positions. `attention.loop` asks it four things: the `span` of keys that a
block of queries can see, how many keys that is at `widest`, the pairs of one
`block`, and keys without what nobody may read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import arguments
from attention import mods as mods_lib
from attention.layout import cut
from attention.mods import BlockMask, MaskMod, Mod

_STATIC: Any = {"static": True}

_FARTHEST = 2**30
"""A window of more positions is one of this many, which int32 can add to others."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
  """A conjunction of conditions on a pair of query t and key s.

  It is a pytree. Without any condition every query sees every key.

  Attributes:
    masks: each broadcastable to `[B, N, T, S]`, True = attend.
    segments: pairs of ids `[B, T]` and `[B, S]`, which must be equal.
    bands: (a `[B, T]`, b `[B, S]`, w, inside): 0 ≤ a_t − b_s < w is `inside`.
    mods: functions (b, n, t, s) -> bool.
    left: the key lies at most so far before the query; None sets no limit.
    right: and at most so far behind it. Causal is 0.
    query_start: position of the first query.
    key_start: position of the first key.
    block_mask: the only blocks that are visited, from `make_block_mask`.
  """

  # Not typed as arrays: JAX puts other things into a pytree, too.
  masks: tuple[Any, ...] = ()
  segments: tuple[tuple[Any, Any], ...] = ()
  bands: tuple[tuple[Any, Any, Any, Any], ...] = ()
  mods: tuple[Mod, ...] = ()
  left: int | None = dataclasses.field(default=None, metadata=_STATIC)
  right: int | None = dataclasses.field(default=None, metadata=_STATIC)
  query_start: Any = 0
  key_start: Any = 0
  block_mask: BlockMask | None = dataclasses.field(
    default=None, metadata=_STATIC
  )

  def __and__(self, other: "Visible") -> "Visible":
    """Both conditions; positions are those of the first."""
    return dataclasses.replace(
      self,
      masks=self.masks + other.masks,
      segments=self.segments + other.segments,
      bands=self.bands + other.bands,
      mods=self.mods + other.mods,
      left=_smaller(self.left, other.left),
      right=_smaller(self.right, other.right),
      block_mask=self.block_mask or other.block_mask,
    )

  def traced(self, shape: tuple[int, int, int, int]) -> "Visible":
    """The same with its mods traced for tiles (B, N, C, D)."""
    if not self.mods:
      return self
    mods = (mods_lib.traced_mask(mod, shape) for mod in self.mods)
    return dataclasses.replace(self, mods=tuple(mods))

  def span(
    self, start: Array | int, rows: int, source_length: int
  ) -> tuple[Array | int, Array | int]:
    """The keys [lo, hi) that `rows` queries from number `start` on can see."""
    start = start + self.query_start - self.key_start
    low, high = 0, source_length
    if self.left is not None:
      low = jnp.clip(start - self.left, 0, source_length)
    if self.right is not None:
      high = jnp.clip(start + rows + self.right, 0, source_length)
    return low, high

  def widest(self, rows: int, source_length: int) -> int:
    """The most keys that a block of `rows` queries can see."""
    if self.left is None or self.right is None:
      return source_length
    return min(source_length, rows + self.left + self.right)

  def block(
    self,
    start: Array | int,
    rows: int,
    first: Array | int,
    width: int,
    fresh: Array | int | None = None,
  ) -> Bool[Array, "#B #N #C #D"] | None:
    """Which pairs of `rows` queries and `width` keys count; None is all.

    Args:
      start: number of the first query.
      rows: C.
      first: number of the first key.
      width: D.
      fresh: keys before this number do not count, if given.
    """
    keys = first + jnp.arange(width)
    distance = (keys + self.key_start)[None, :] - (
      start + self.query_start + jnp.arange(rows)
    )[:, None]
    conditions = []
    if fresh is not None:
      conditions.append((keys >= fresh)[None, None, None])
    if self.left is not None:
      conditions.append((distance >= -self.left)[None, None])
    if self.right is not None:
      conditions.append((distance <= self.right)[None, None])
    for mask in self.masks:
      if mask.shape[2] > 1:
        mask = cut(mask, start, rows, axis=2)
      if mask.shape[3] > 1:
        mask = cut(mask, first, width, axis=3)
      conditions.append(mask)
    for query_ids, key_ids in self.segments:
      query_ids, key_ids = (
        cut(query_ids, start, rows),
        cut(key_ids, first, width),
      )
      conditions.append((query_ids[:, :, None] == key_ids[:, None, :])[:, None])
    for query_codes, key_codes, size, inside in self.bands:
      query_codes = cut(query_codes, start, rows)[:, :, None]
      apart = query_codes - cut(key_codes, first, width)[:, None, :]
      is_inside = (apart >= 0) & (apart < size)
      conditions.append((is_inside == inside)[:, None])
    for mod in self.mods:
      places = self.query_start + start, self.key_start + first
      conditions.append(mod(*mod.indices(*places)))
    if not conditions:
      return None
    shown, *others = conditions
    for condition in others:
      shown = shown & condition
    return shown

  def at(
    self, query: Int[Array, "B X"], key: Int[Array, "B Y"]
  ) -> Bool[Array, "B X Y"]:
    """Which pairs of any positions count, of key masks, segments and windows."""
    distance = key[:, None, :] - query[:, :, None]
    shown = jnp.ones(distance.shape, bool)
    if self.left is not None:
      shown &= distance >= -self.left
    if self.right is not None:
      shown &= distance <= self.right
    for mask in self.masks:
      mask = jnp.broadcast_to(mask[:, 0, 0], (len(key), mask.shape[3]))
      shown &= jnp.take_along_axis(mask, key, 1)[:, None, :]
    for query_ids, key_ids in self.segments:
      query_ids = jnp.take_along_axis(query_ids, query, 1)
      key_ids = jnp.take_along_axis(key_ids, key, 1)
      shown &= query_ids[:, :, None] == key_ids[:, None, :]
    return shown

  def readable(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S K H"]:
    """Keys or values, zero where a key mask hides them.

    So not even a NaN that stands in padding gets through a product.
    """
    for mask in self.masks:
      if mask.shape[1] == mask.shape[2] == 1:
        x = jnp.where(mask[:, 0, 0, :, None, None], x, 0)
    return x


def causal() -> Visible:
  """A query sees no later key."""
  return Visible(right=0)


def window(left: int | None, right: int | None) -> Visible:
  """A query sees keys from `left` before it to `right` behind it.

  Args:
    left: at least 0; None sets no limit.
    right: likewise.

  Raises:
    ValueError: a side is not an int of at least 0.
  """
  for side in (left, right):
    is_int = isinstance(side, int | np.integer) and not isinstance(side, bool)
    if side is not None and not (is_int and side >= 0):
      raise ValueError(
        f"window: expected ints of at least 0 or None, got {(left, right)!r}"
      )
  left, right = (
    None if side is None else min(int(side), _FARTHEST)
    for side in (left, right)
  )
  return Visible(left=left, right=right)


def segments(
  query_segment_ids: Int[Array, "B T"], key_segment_ids: Int[Array, "B S"]
) -> Visible:
  """A query sees keys of its own segment only."""
  return Visible(segments=((query_segment_ids, key_segment_ids),))


def key_mask(mask: Bool[Array, "B S"]) -> Visible:
  """Nobody sees a key where `mask` is False, and its content changes nothing."""
  if mask.ndim != 2 or mask.dtype != jnp.bool_:
    raise ValueError(
      f"key_mask: expected bool [B, S], got {mask.dtype} {mask.shape}"
    )
  return Visible(masks=(mask[:, None, None, :],))


def pair_mask(mask: Bool[Array, "#B #N #T #S"]) -> Visible:
  """A query sees a key where `mask`, broadcast to `[B, N, T, S]`, is True."""
  if mask.ndim != 4 or mask.dtype != jnp.bool_:
    raise ValueError(
      "pair_mask: expected bool broadcastable to [B, N, T, S], got "
      f"{mask.dtype} {mask.shape}"
    )
  return Visible(masks=(mask,))


def mask_mod(function: MaskMod, block_mask: BlockMask | None = None) -> Visible:
  """A query sees a key where `function(b, n, t, s)` is True.

  Args:
    function: of indices that broadcast against `[B, N, T, S]`.
    block_mask: from `make_block_mask(function, …)`: blocks that it hides are never
      visited, and its block size is taken.
  """
  mod = mods_lib.untraced("mask_mod", function)
  return Visible(mods=(mod,), block_mask=block_mask)


def visible_from_options(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  *,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  mask_mod: MaskMod | None = None,
  block_mask: BlockMask | None = None,
  visible: Visible | None = None,
) -> Visible:
  """What the options of an attention function say of visibility, checked.

  Raises:
    ValueError: one does not fit the query or the key.
  """
  batch, length, num_heads, _ = query.shape
  shape = (batch, num_heads, length, key.shape[1])
  arguments.check_mask(mask, shape)
  ids = query_segment_ids, key_segment_ids
  arguments.check_segment_ids(*ids, query, key)
  if block_mask is not None:
    _check_block_mask(block_mask, mask_mod, shape)
  options = Visible(
    masks=() if mask is None else (mask,),
    segments=() if query_segment_ids is None else (ids,),
    right=0 if is_causal else None,
    block_mask=block_mask,
  )
  if mask_mod is not None:
    mod = mods_lib.untraced("mask_mod", mask_mod)
    options = dataclasses.replace(options, mods=(mod,))
  if visible is None:
    return options
  if not isinstance(visible, Visible):
    raise ValueError(
      f"visible: expected a Visible, got {type(visible).__name__}"
    )
  for one in visible.masks:
    arguments.check_mask(one, shape)
  for ids in visible.segments:
    arguments.check_segment_ids(*ids, query, key)
  if visible.block_mask is not None:
    _check_block_mask(visible.block_mask, visible.mods, shape)
  return visible & options


def _check_block_mask(
  block_mask: BlockMask, mask_mod: Any, shape: tuple[int, int, int, int]
) -> None:
  """Checks that a block mask is one of this call."""
  if not mask_mod:
    raise ValueError(
      "block_mask: expected the mask_mod that it was made of, got None"
    )
  if (block_mask.length, block_mask.source_length) != shape[2:]:
    raise ValueError(
      f"block_mask: expected one for lengths {shape[2:]}, got "
      f"{(block_mask.length, block_mask.source_length)}"
    )


def _smaller(x: int | None, y: int | None) -> int | None:
  return min((z for z in (x, y) if z is not None), default=None)
