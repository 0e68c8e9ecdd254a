"""Which query may see which key: one type for every reason.

    sees = visibility.pairs(mask) & visibility.segments(ids, ids)
    sees &= visibility.CAUSAL & visibility.window(4, 0)

A `Visibility` is a conjunction. Masks and segments are arrays, and are kept as
they came, so that a key mask `[B, 1, 1, S]` never grows to T×S. Causality and
windows are read off positions. `block` gives the part that one tile needs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.core import mods as mods_lib
from attention.core.layout import cut
from attention.core.mods import Traced
from attention.mods import MaskMod


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """A conjunction of conditions on a pair of query t and key s.

  Attributes:
    masks: each broadcastable to `[B, N, T, S]`, True = attend.
    segments: pairs of ids `[B, T]` and `[B, S]`, which must be equal.
    left: the key lies at most so far before the query; None sets no limit.
    right: and at most so far behind it. Causal is 0.
    consts: the arrays that each of `mods` closes over.
    mods: functions of indices that must show it.
  """

  # Not typed as arrays: JAX puts other things into a pytree, too.
  masks: tuple[Any, ...] = ()
  segments: tuple[tuple[Any, Any], ...] = ()
  left: int | None = dataclasses.field(default=None, metadata={"static": True})
  right: int | None = dataclasses.field(default=None, metadata={"static": True})
  consts: tuple[Any, ...] = ()
  mods: tuple[Traced, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )

  def __and__(self, other: "Visibility") -> "Visibility":
    """Both conditions."""
    return Visibility(
      self.masks + other.masks,
      self.segments + other.segments,
      _smaller(self.left, other.left),
      _smaller(self.right, other.right),
      self.consts + other.consts,
      self.mods + other.mods,
    )

  @property
  def by_data(self) -> bool:
    """Whether arrays, and not positions alone, hide a pair."""
    return bool(self.masks or self.segments or self.mods)

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
      start: position of the first query.
      rows: C.
      first: position of the first key.
      width: D.
      fresh: keys before this position do not count, if given.
    """
    keys = first + jnp.arange(width)
    distance = keys[None, :] - (start + jnp.arange(rows))[:, None]
    found = None if fresh is None else (keys >= fresh)[None, None, None]
    if self.left is not None:
      found = both(found, (distance >= -self.left)[None, None])
    if self.right is not None:
      found = both(found, (distance <= self.right)[None, None])
    for mask in self.masks:
      if mask.shape[2] > 1:
        mask = cut(mask, start, rows, axis=2)
      if mask.shape[3] > 1:
        mask = cut(mask, first, width, axis=3)
      found = both(found, mask)
    for of_query, of_key in self.segments:
      of_query, of_key = cut(of_query, start, rows), cut(of_key, first, width)
      same = of_query[:, :, None] == of_key[:, None, :]
      found = both(found, same[:, None])
    for mod, consts in zip(self.mods, self.consts, strict=True):
      found = both(found, mods_lib.shown(mod, consts, start, first))
    return found

  def at(
    self, query: Int[Array, "B X"], key: Int[Array, "B Y"]
  ) -> Bool[Array, "B X Y"]:
    """Which pairs at any positions count; masks must be key masks.

    There must be no `mods`.
    """
    found = jnp.ones((*query.shape, key.shape[1]), bool)
    distance = key[:, None, :] - query[:, :, None]
    if self.left is not None:
      found &= distance >= -self.left
    if self.right is not None:
      found &= distance <= self.right
    for mask in self.masks:
      mask = jnp.broadcast_to(mask[:, 0, 0], (len(key), mask.shape[3]))
      found &= by_example(mask, key)[:, None, :]
    for of_query, of_key in self.segments:
      of_query, of_key = by_example(of_query, query), by_example(of_key, key)
      found &= of_query[:, :, None] == of_key[:, None, :]
    return found

  def readable(
    self, x: Float[Array, "B D K H"], first: Array | int
  ) -> Float[Array, "B D K H"]:
    """Keys or values from `first` on, zero where a key mask hides them.

    So not even a NaN that stands in padding gets through a product.
    """
    for mask in self.masks:
      if mask.shape[1] == mask.shape[2] == 1:
        if mask.shape[3] > 1:
          mask = cut(mask, first, x.shape[1], axis=3)
        x = jnp.where(mask[:, 0, 0, :, None, None], x, 0)
    return x


EVERYTHING = Visibility()
CAUSAL = Visibility(right=0)


def pairs(mask: Bool[Array, "..."] | None) -> Visibility:
  """A mask broadcastable to `[B, N, T, S]`, True = attend; None hides nothing."""
  return EVERYTHING if mask is None else Visibility(masks=(mask,))


def keys(mask: Bool[Array, "B S"] | None) -> Visibility:
  """Keys that nobody sees; None hides nothing."""
  return pairs(None if mask is None else mask[:, None, None, :])


def segments(
  of_query: Int[Array, "B T"] | None, of_key: Int[Array, "B S"] | None
) -> Visibility:
  """A query sees keys of its own segment only; None makes no difference."""
  if of_query is None or of_key is None:
    return EVERYTHING
  return Visibility(segments=((of_query, of_key),))


def window(left: int | None, right: int | None) -> Visibility:
  """Keys from `left` before the query to `right` behind it."""
  return Visibility(left=left, right=right)


def by_mod(
  mask_mod: MaskMod | None, shape: tuple[int, int, int, int]
) -> Visibility:
  """What a mask_mod shows of tiles (B, N, C, D); None shows everything."""
  if mask_mod is None:
    return EVERYTHING
  traced, consts = mods_lib.trace_mask(mask_mod, shape)
  return Visibility(consts=(consts,), mods=(traced,))


def of_call(
  mask: Bool[Array, "..."] | None,
  query_segment_ids: Int[Array, "B T"] | None,
  key_segment_ids: Int[Array, "B S"] | None,
  is_causal: bool,
) -> Visibility:
  """What the arguments of an attention function say of visibility."""
  sees = pairs(mask) & segments(query_segment_ids, key_segment_ids)
  return sees & CAUSAL if is_causal else sees


def both(
  x: Bool[Array, "..."] | None, y: Bool[Array, "..."] | None
) -> Bool[Array, "..."] | None:
  """The conjunction of two masks of which None hides nothing."""
  if x is None or y is None:
    return y if x is None else x
  return x & y


def by_example(
  x: Shaped[Array, "B T *F"], index: Int[Array, "B G"]
) -> Shaped[Array, "B G *F"]:
  """Rows of `x` at other positions in every example."""
  return jax.vmap(lambda rows, i: rows[i])(x, index)


def _smaller(x: int | None, y: int | None) -> int | None:
  if x is None or y is None:
    return y if x is None else x
  return min(x, y)
