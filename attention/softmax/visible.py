"""The keys that each query may attend to: `Visible`.

    visible = causal() & window(256, 0) & segments(ids, ids) & key_mask(keep)

A `Visible` is a conjunction of conditions on a pair of query and key. Arrays keep their
shapes, so that a key mask is never expanded to T×S; causality and windows are computed
from positions. `attention.softmax.tiles` gets from it the `span` of keys that a block
of queries can see, the visible pairs of one `block`, and `readable` keys and values.
"""

from collections.abc import Callable
import dataclasses
import functools
import operator
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import checks
from attention.platform import programs
from attention.platform.layout import cut
from attention.softmax import mods as mods_lib
from attention.softmax.mods import BlockMask, MaskMod, Mod

_STATIC: Any = {"static": True}

FARTHEST = 2**29
"""The largest side of a window; larger ones are clipped, so that int32 suffices."""

Rows = tuple[Callable[[Array], Array], Int[Array, "B _"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visible:
  """A conjunction of conditions on a pair of query t and key s.

  It is a pytree. Without conditions, every query sees every key.

  Attributes:
    masks: each broadcastable to `[B, N, T, S]`, True = attend.
    segments: pairs of ids `[B, T]` and `[B, S]`, which must be equal.
    lengths: pairs (t `[B]`, s `[B]`) of the numbers of queries and keys that count, or
      None for all; `visible_from_options` converts them to masks and segments.
    bands: (a `[B, T]`, b `[B, S]`, w, inside): a pair is visible if the truth of
      0 ≤ a_t − b_s < w equals `inside`.
    mods: functions (b, n, t, s) -> bool, see `attention.softmax.mods`.
    left: the largest distance of a key before the query; None sets no limit.
    right: the largest distance of a key after the query; 0 if causal.
    query_start: position of the first query, for `left`, `right` and mods; None means 0.
    key_start: position of the first key.
    block_mask: the blocks that are visited, from `make_block_mask`; None means all.
  """

  # Not typed as arrays, because JAX also puts other objects into pytrees.
  masks: tuple[Any, ...] = ()
  segments: tuple[tuple[Any, Any], ...] = ()
  lengths: tuple[tuple[Any, Any], ...] = ()
  bands: tuple[tuple[Any, Any, Any, Any], ...] = ()
  mods: tuple[Mod, ...] = ()
  left: int | None = dataclasses.field(default=None, metadata=_STATIC)
  right: int | None = dataclasses.field(default=None, metadata=_STATIC)
  query_start: Any = None
  key_start: Any = None
  block_mask: BlockMask | None = None

  @property
  def positions(self) -> tuple[Any, Any] | None:
    """(`query_start`, `key_start`), or None if neither is given."""
    starts = self.query_start, self.key_start
    return None if all(x is None for x in starts) else starts

  def places(self, start: Any, first: Any) -> tuple[Any, Any]:
    """The positions of the query number `start` and of the key number `first`."""
    if self.query_start is not None:
      start = start + self.query_start
    return start, first if self.key_start is None else first + self.key_start

  def __and__(self, other: "Visible") -> "Visible":
    """Both conditions, with the starts of the side that has them.

    Raises:
      ValueError: both sides have starts, and these differ.
    """
    lefts, rights = (self.left, other.left), (self.right, other.right)
    starts = self.positions or other.positions or (None, None)
    if other.positions and not all(map(_is_same, starts, other.positions)):
      raise ValueError(
        "visible: expected both sides of & to have the same query_start and "
        f"key_start, got {self.positions} and {other.positions}; combine the "
        "conditions first and set their starts once, by dataclasses.replace"
      )
    return dataclasses.replace(
      self,
      query_start=starts[0],
      key_start=starts[1],
      masks=self.masks + other.masks,
      segments=self.segments + other.segments,
      lengths=self.lengths + other.lengths,
      bands=self.bands + other.bands,
      mods=self.mods + other.mods,
      left=min((x for x in lefts if x is not None), default=None),
      right=min((x for x in rights if x is not None), default=None),
      block_mask=self.block_mask or other.block_mask,
    )

  def with_lengths_masked(
    self, length: int, source_length: int, axis_name: str | None = None
  ) -> "Visible":
    """Converts `lengths` to masks and segments, for T queries and S keys.

    With `axis_name`, these are this device's shards of the sequences.
    """
    visible = dataclasses.replace(self, lengths=())
    rank = 0 if axis_name is None else jax.lax.axis_index(axis_name)

    def is_padding(counts, size):
      return rank * size + jnp.arange(size)[None] >= counts[:, None]

    for queries, keys in self.lengths:
      if keys is not None:
        visible &= key_mask(~is_padding(keys, source_length))
      if queries is not None:
        # Queries beyond the length get a segment id that no key has.
        ids = is_padding(queries, length).astype(jnp.int32)
        key_ids = jnp.zeros((ids.shape[0], source_length), jnp.int32)
        visible &= segments(ids, key_ids)
    return visible

  def trace(
    self, shape: tuple[int, int, int, int], like: Any = ()
  ) -> "Visible":
    """Traces its mods for tiles (B, N, C, D); see `traced_mask`."""
    if not self.mods:
      return self
    mods = (mods_lib.traced_mask(mod, shape, like) for mod in self.mods)
    return dataclasses.replace(self, mods=tuple(mods))

  def span(
    self, start: Array | int, rows: int, source_length: int
  ) -> tuple[Array | int, Array | int]:
    """The keys [low, high) that `rows` queries from number `start` on can see."""
    start, first = self.places(start, 0)
    start = start - first
    low, high = 0, source_length
    if self.left is not None:
      low = jnp.clip(start - self.left, 0, source_length)
    if self.right is not None:
      high = jnp.clip(start + rows + self.right, 0, source_length)
    return low, high

  def block(
    self,
    start: Array | int,
    rows: int,
    first: Array | int,
    width: int,
    first_new: Array | int | None = None,
  ) -> Bool[Array, "#B #N #C #D"] | None:
    """The visible pairs of `rows` queries from `start` and `width` keys from `first`.

    None means all. If `first_new` is given, keys before that number are not visible.
    """
    places = self.places(start, first)
    keys = first + jnp.arange(width)
    distance = (places[1] + jnp.arange(width))[None, :] - (
      places[0] + jnp.arange(rows)
    )[:, None]
    conditions = []
    if first_new is not None:
      conditions.append((keys >= first_new)[None, None, None])
    if self.left is not None:
      conditions.append((distance >= -self.left)[None, None])
    if self.right is not None:
      conditions.append((distance <= self.right)[None, None])
    for mask in self.masks:
      mask = cut(mask, start, rows, axis=2) if mask.shape[2] > 1 else mask
      mask = cut(mask, first, width, axis=3) if mask.shape[3] > 1 else mask
      conditions.append(mask)
    for query_ids, key_ids in self.segments:
      query_ids = cut(query_ids, start, rows)[:, None, :, None]
      key_ids = cut(key_ids, first, width)[:, None, None, :]
      conditions.append(query_ids == key_ids)
    for query_codes, key_codes, size, inside in self.bands:
      query_codes = cut(query_codes, start, rows)[:, None, :, None]
      offset = query_codes - cut(key_codes, first, width)[:, None, None, :]
      conditions.append(((offset >= 0) & (offset < size)) == inside)
    for mod in self.mods:
      conditions.append(mod(*mod.indices(*places)))
    return functools.reduce(operator.and_, conditions) if conditions else None

  def select(self, queries: Rows, keys: Rows) -> "Visible":
    """The key masks, segments and sides for selected queries and keys.

    `queries` and `keys` are pairs: a function that selects rows of an array
    `[B, T, …]`, and the positions `[B, X]` of these rows.
    """
    (query_rows, query_positions), (key_rows, key_positions) = queries, keys
    batch, bands = key_positions.shape[0], ()
    if self.left is not None or self.right is not None:
      left, right = (
        FARTHEST if side is None else side for side in (self.left, self.right)
      )
      size = left + right + 1
      bands = ((query_positions + right, key_positions, size, True),)
    masks = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in self.masks)
    return Visible(
      masks=tuple(key_rows(x[:, 0, 0])[:, None, None] for x in masks),
      segments=tuple((query_rows(x), key_rows(y)) for x, y in self.segments),
      bands=bands,
    )

  def readable(self, x: Float[Array, "B S K H"]) -> Float[Array, "B S K H"]:
    """Zeros keys or values that are masked for all queries and heads, even if NaN."""
    for mask in self.masks:
      # XLA:CPU takes a hundred times longer to reduce both axes at once.
      any_head = functools.reduce(operator.or_, jnp.unstack(mask, axis=1))
      x = jnp.where(jnp.any(any_head, 1)[..., None, None], x, 0)
    return x


def _is_same(x: Any, y: Any) -> bool:
  """Whether two positions are known to be equal."""
  if x is y:
    return True
  is_traced = any(isinstance(z, jax.core.Tracer) for z in (x, y))
  return not is_traced and np.array_equal(x, y)


def causal() -> Visible:
  """A query sees no later key."""
  return Visible(right=0)


def window(left: int | None, right: int | None) -> Visible:
  """A query sees keys from `left` positions before it to `right` positions after it.

  A side of None sets no limit.

  Raises:
    ValueError: a side is neither None nor an int of at least 0.
  """
  checks.check_static("window", (left, right))
  for side in (left, right):
    is_int = isinstance(side, int | np.integer) and not isinstance(side, bool)
    if side is not None and not (is_int and side >= 0):
      raise ValueError(
        f"window: expected ints of at least 0 or None, got {(left, right)!r}"
      )
  left, right = (
    side if side is None else min(int(side), FARTHEST) for side in (left, right)
  )
  return Visible(left=left, right=right)


def segments(
  query_segment_ids: Int[Array, "B T"], key_segment_ids: Int[Array, "B S"]
) -> Visible:
  """A query sees only keys of its own segment."""
  return Visible(segments=((query_segment_ids, key_segment_ids),))


def lengths(
  query_lengths: Int[Array, "B"] | None = None,
  key_lengths: Int[Array, "B"] | None = None,
) -> Visible:
  """The first queries and keys of each example count; the others are padding.

  The arguments are `query_seq_lengths` and `key_value_seq_lengths` of
  `jax.nn.dot_product_attention`. The output of padding is 0. None means all positions.

  Raises:
    ValueError: one is neither None nor integers `[B]`.
  """
  arguments = {"query_lengths": query_lengths, "key_lengths": key_lengths}
  for name, x in arguments.items():
    if x is not None and (
      np.ndim(x) != 1 or not jnp.issubdtype(jnp.result_type(x), jnp.integer)
    ):
      raise ValueError(
        f"{name}: expected integers [B] or None, got {jnp.result_type(x)} "
        f"{np.shape(x)}"
      )
  queries, keys = (
    None if x is None else jnp.asarray(x) for x in arguments.values()
  )
  return Visible(lengths=((queries, keys),))


def key_mask(mask: Bool[Array, "B S"]) -> Visible:
  """A query sees a key where `mask` is True; other keys never affect the output."""
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

  The indices broadcast to `[B, N, T, S]`. A call visits only the blocks in
  `block_mask`, from `make_block_mask(function, …)`, and uses its block size.
  """
  mod = mods_lib.untraced("mask_mod", function)
  return Visible(mods=(mod,), block_mask=block_mask)


def visible_in_tile(
  rows: int,
  keep: Bool[Array, "B D"] | None,
  query_ids: Int[Array, "B C"] | None,
  key_ids: Int[Array, "B D"] | None,
  right: int | None = None,
) -> Bool[Array, "B 1 C D"] | None:
  """The visible pairs of C = `rows` queries and as many keys; None means all.

  Args:
    rows: C.
    keep: the unmasked keys.
    query_ids: segments of the queries.
    key_ids: segments of the keys.
    right: the largest distance of a key after the query, as in `Visible`.
  """
  return Visible(
    masks=() if keep is None else (keep[:, None, None],),
    segments=() if key_ids is None else ((query_ids, key_ids),),
    right=right,
  ).block(0, rows, 0, rows)


EVERY_PAIR = Visible()
"""Every query sees every key."""


class VisibleOptions(TypedDict, total=False):
  """The keywords of attention functions for visibility.

  The decorator converts them to one `Visible`, which it passes to the function.
  """

  mask: Bool[Array, "..."] | None
  is_causal: bool
  query_segment_ids: Int[Array, "B T"] | None
  key_segment_ids: Int[Array, "B S"] | None


SEEN = frozenset({*VisibleOptions.__annotations__, "mask_mod", "block_mask"})
"""The keywords of attention functions that `visible_from_options` takes."""


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
  axis_name: str | None = None,
) -> Visible:
  """Checks the options of an attention function, and converts them to one `Visible`.

  With `axis_name`, query and key are this device's shards of a sequence.

  Raises:
    ValueError: an option does not fit the query or the key.
  """
  batch, length, num_heads, _ = query.shape
  shape = (batch, num_heads, length, key.shape[1])
  ids = query_segment_ids, key_segment_ids
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
      f"visible: expected a Visible, got {programs.type_name(visible)}"
    )
  for pair in visible.lengths:
    for name, x in zip(("query_lengths", "key_lengths"), pair, strict=True):
      if x is not None and x.shape != (batch,):
        raise ValueError(f"{name}: expected [B] = ({batch},), got {x.shape}")
  visible = visible.with_lengths_masked(length, key.shape[1], axis_name)
  arrays = {"query": query, "key": key}
  for mask in visible.masks:
    checks.check_call({**arrays, "mask": mask})
  for ids in visible.segments:
    names = ("query_segment_ids", "key_segment_ids")
    checks.check_call({**arrays, **dict(zip(names, ids, strict=True))})
  if visible.block_mask is not None:
    _check_block_mask(visible.block_mask, visible.mods, shape)
  visible &= options
  if visible.block_mask is not None and visible.positions is not None:
    raise ValueError(
      "block_mask: expected no query_start and key_start with it, got "
      f"{visible.positions}; its blocks are those of positions from 0 on"
    )
  return visible


def _check_block_mask(
  block_mask: BlockMask, mask_mod: Any, shape: tuple[int, int, int, int]
) -> None:
  """Checks that a block mask fits this call."""
  if not mask_mod:
    raise ValueError(
      "block_mask: expected the mask_mod from which it was made, got None"
    )
  if (block_mask.length, block_mask.source_length) != shape[2:]:
    raise ValueError(
      f"block_mask: expected one for lengths {shape[2:]}, got "
      f"{(block_mask.length, block_mask.source_length)}"
    )
