"""What a tile of `sliding_window_attention` sees: near keys and global ones.

The C queries [a, a+C) together see at most W = min(S, C + left + right) keys,
the slice [f, f+W) with f = clip(a − left, 0, S − W). Which query sees which key
follows from the positions, so a clipped slice is not a special case. The keys
of G global tokens are appended to the slice, and one softmax runs over the
union.
"""

import dataclasses
from typing import NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core import (
  dropout,
  forgetting,
  layout,
  loop,
  mods,
  platform,
  visibility,
)
from attention.core.relative import Relative
from attention.core.tile import Keys, Product
from attention.core.visibility import Visibility
from attention.mods import MaskMod, ScoreMod


class Arrays(NamedTuple):
  """Arrays with a derivative, except queries and tables; G may be 0."""

  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  global_key: Float[Array, "B G K H"]
  global_value: Float[Array, "B G K V"]
  forgotten: Float[Array, "B T N 2"] | None = None


class Limits(NamedTuple):
  """Which pairs count, and the key of the dropout.

  Attributes:
    near: the visibility of the keys in the slice, including the window.
    of_globals: which global keys a query sees, under all conditions.
    rng: a key; not read where the rate is 0.
  """

  near: Visibility
  of_globals: Bool[Array, "B T G"]
  rng: Array | None


@dataclasses.dataclass(frozen=True)
class Near:
  """The `loop.Source` of a window.

  Attributes:
    left: keys of the window before the query.
    width: W, keys of a slice.
    source_length: S.
    dropout_rate: share of weights set to zero.
  """

  rows: int
  at_once: int
  kv_heads: int
  num_heads: int
  score: Product
  by_data: bool
  left: int
  width: int
  source_length: int
  dropout_rate: float

  def visits(self, start: Array | int) -> None:
    """One visit."""
    del start

  def _first(self, place: loop.Place) -> Array:
    """The position f of the first key of the slice."""
    last = self.source_length - self.width
    return jnp.clip(place.start - self.left, 0, last)

  def gather(self, arrays: Arrays, fixed: Limits, place: loop.Place) -> Keys:
    """The slice of keys and values, and the global ones after it."""
    first = self._first(place)

    def read(x, of_globals):
      x = fixed.near.readable(layout.cut(x, first, self.width), first)
      if of_globals.shape[1]:
        x = jnp.concatenate([x, of_globals], axis=1)
      return layout.heads_first(x, self.kv_heads)

    bias = None
    if arrays.forgotten is not None:
      of_query = layout.cut(arrays.forgotten, place.start, self.rows)
      of_key = layout.cut(arrays.forgotten, first, self.width)
      bias = forgetting.between(of_query, of_key)
      bias = layout.by_kv_head(bias, self.kv_heads)
    return Keys(
      read(arrays.key, arrays.global_key),
      read(arrays.value, arrays.global_value),
      bias,
    )

  def limit(
    self, keys: Keys, fixed: Limits, place: loop.Place, *, is_whole: bool
  ) -> Keys:
    """Which pairs count, and which of them dropout keeps."""
    del is_whole
    first = self._first(place)
    visible = fixed.near.block(place.start, self.rows, first, self.width)
    if fixed.of_globals.shape[2]:
      of_globals = layout.cut(fixed.of_globals, place.start, self.rows)[:, None]
      shape = (*of_globals.shape[:3], self.width)
      visible = jnp.broadcast_to(cast(Array, visible), shape)
      visible = jnp.concatenate([visible, of_globals], axis=3)
    kept = None
    if self.dropout_rate:
      batch, kv_heads, width, _ = keys.key.shape
      groups = self.num_heads // kv_heads
      shape = (batch, kv_heads, groups, self.rows, width)
      kept = dropout.kept(fixed.rng, self.dropout_rate, shape, place.number)
    return keys._replace(
      visible=layout.by_kv_head(visible, self.kv_heads),
      kept=kept,
      offset=first - place.start,
      start=place.start,
    )

  def add(
    self, totals: Arrays, gradient: Keys, fixed: Limits, place: loop.Place
  ) -> Arrays:
    """Adds the gradients of one tile at the places of its keys."""
    del fixed
    first, width = self._first(place), self.width

    def spread(total, of_globals, block):
      block = layout.heads_last(block, block.shape[2])
      total = layout.add(total, block[:, :width], first)
      return total, of_globals + block[:, width:]

    key, global_key = spread(totals.key, totals.global_key, gradient.key)
    value, global_value = spread(
      totals.value, totals.global_value, gradient.value
    )
    forgotten = totals.forgotten
    if forgotten is not None:
      pairs = cast(Array, gradient.bias)
      pairs = pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:])
      of_query, of_key = forgetting.gradients(pairs)
      forgotten = layout.add(forgotten, of_query, place.start)
      forgotten = layout.add(forgotten, of_key, first)
    return Arrays(key, value, global_key, global_value, forgotten)


def windowed_attention(
  query: Float[Array, "B T N H"],
  arrays: Arrays,
  tables: Relative,
  limits: Limits,
  *,
  sides: tuple[int, int],
  rows: int | None,
  scale: float,
  dropout_rate: float,
  soft_cap: float | None = None,
  score_mod: ScoreMod | None = None,
  mask_mod: MaskMod | None = None,
) -> Float[Array, "B T N V"]:
  """Softmax attention over a window of `sides` (left, right) and the globals.

  Args:
    query: `[B, T, N, H]`.
    arrays: keys and values, those of global tokens included.
    tables: the tables of relative positions.
    limits: which pairs count; the window is added here.
    sides: the number of keys before and after the query.
    rows: C; None is the choice of `core.platform.window_rows`.
    scale: factor of the logits.
    dropout_rate: share of weights set to zero.
    soft_cap: c of c · tanh(logit / c); None is none.
    score_mod: as in `sliding_window_attention`, without global keys.
    mask_mod: likewise.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.
  """
  source, limits = _source(
    query,
    arrays,
    limits,
    sides,
    rows,
    Product(scale, soft_cap=soft_cap),
    dropout_rate,
  )
  tile = (len(query), source.num_heads, source.rows, source.width)
  near = limits.near & visibility.by_mod(mask_mod, tile)
  limits = limits._replace(near=near)
  score = source.score
  if score_mod is not None:
    traced, closed_over = mods.trace_score(score_mod, tile)
    score = score._replace(score_mod=traced)
    tables = tables._replace(closed_over=closed_over)
  source = dataclasses.replace(source, score=score, by_data=near.by_data)
  return loop.attend(source, query, arrays, tables, limits)


def window_with_total(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  sees: Visibility,
  *,
  sides: tuple[int, int],
  rows: int | None,
  scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """Softmax attention over a window, and Σ e^(x − max x) of every query.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    sees: which pairs count; the window is added here.
    sides: the number of keys before and after the query.
    rows: C; None is the choice of `core.platform.window_rows`.
    scale: factor of the logits.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, and `[B, T, N, 1]` in float32, 0 for
    a query that sees no key; see `loop.attend_with_total`.
  """
  arrays = Arrays(key, value, key[:, :0], value[:, :0])
  limits = Limits(sees, jnp.zeros((*query.shape[:2], 0), bool), None)
  source, limits = _source(
    query, arrays, limits, sides, rows, Product(scale), 0.0
  )
  return loop.attend_with_total(source, query, arrays, Relative(), limits)


def _source(
  query: Float[Array, "B T N H"],
  arrays: Arrays,
  limits: Limits,
  sides: tuple[int, int],
  rows: int | None,
  score: Product,
  dropout_rate: float,
) -> tuple[Near, Limits]:
  """The source of a window, and the limits with the window in them."""
  batch, length, num_heads, head_dim = query.shape
  source_length, kv_heads, value_dim = arrays.value.shape[1:]
  # A window never needs to reach beyond the sequence.
  left, right = min(sides[0], length), min(sides[1], source_length)
  if rows is None:
    rows = platform.window_rows(left + right + 1)
  rows = min(rows, length)
  width = min(source_length, rows + left + right)
  tile_bytes = 4 * batch * num_heads * (rows + head_dim + value_dim) * width
  near = limits.near & visibility.window(left, right)
  source = Near(
    rows=rows,
    at_once=loop.at_once(length, rows, tile_bytes),
    kv_heads=kv_heads,
    num_heads=num_heads,
    score=score,
    by_data=near.by_data,
    left=left,
    width=width,
    source_length=source_length,
    dropout_rate=dropout_rate,
  )
  return source, limits._replace(near=near)
