"""What a tile of `bigbird_attention` sees: global, near and random blocks.

C positions make a block. Of the ceil(T/C) blocks, the first and the last are
global, and only the last may be partial. A tile is one of the M blocks between
them. Block i, counted from the first of these M, sees X keys in three groups:

  global   the G ≤ 2C positions of the first and the last block,
  near     those of i−1, i, i+1 that are among the M, in min(3, M) blocks,
  random   R blocks for each query head, gathered.

The groups share no key: the near blocks leave out the global ones, and a random
block that is global, near or listed before is hidden. So one softmax over all
three is a softmax over their union.

Keys are `[B, K, T, H]` here, which makes every block contiguous.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.core import dropout, layout, loop
from attention.core.tile import Keys, Product


class Arrays(NamedTuple):
  """The arrays with a derivative, except the queries; hidden keys are zero."""

  key: Float[Array, "B K T H"]
  value: Float[Array, "B K T V"]
  global_key: Float[Array, "B K G H"]
  global_value: Float[Array, "B K G V"]


class Known(NamedTuple):
  """One number for every key: whether it counts, or its segment.

  It has the form of `Arrays` with one head and one feature, so that the same
  code reads both.
  """

  everywhere: Shaped[Array, "B 1 T 1"]
  of_globals: Shaped[Array, "B 1 G 1"]


class Limits(NamedTuple):
  """Which blocks a tile sees, which pairs count, and the key of dropout.

  Attributes:
    random: block numbers, as `distinct_blocks` returns them.
    random_seen: False hides a block of `random`.
    mask: which keys count; None is all.
    query_segments: of the M·C queries.
    key_segments: goes with `query_segments`.
    rng: a key; not read where the rate is 0.
  """

  random: Int[Array, "N M R"]
  random_seen: Bool[Array, "N M R"]
  mask: Known | None
  query_segments: Int[Array, "B Q"] | None
  key_segments: Known | None
  rng: Array | None


def distinct_blocks(
  random_blocks: Int[Array, "N M R"],
) -> tuple[Int[Array, "N M R"], Bool[Array, "N M R"]]:
  """Block numbers, and which of them are seen.

  Numbers are counted from the first block between the globals. A number is not
  seen where it names no block, or a block that is global, near or listed
  before. The query's own block takes its place, so that no other block is read.
  """
  _, middle, slots = random_blocks.shape
  block = random_blocks - 1
  own = jnp.arange(middle)[None, :, None]
  seen = (block >= 0) & (block < middle) & (jnp.abs(block - own) > 1)
  same = block[..., :, None] == block[..., None, :]
  before = jnp.tri(slots, k=-1, dtype=bool)[None, None]
  seen &= ~jnp.any(same & before, axis=-1)
  return jnp.where(seen, block, own), seen


def ends(
  x: Shaped[Array, "..."], block: int, axis: int = 1
) -> Shaped[Array, "..."]:
  """The positions of the first and the last of several blocks."""
  last = (-(-x.shape[axis] // block) - 1) * block
  first = jax.lax.slice_in_dim(x, 0, block, axis=axis)
  rest = jax.lax.slice_in_dim(x, last, x.shape[axis], axis=axis)
  return jnp.concatenate([first, rest], axis=axis)


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The `loop.Source` of the blocks between the globals.

  Attributes:
    rows: C.
    kv_heads: N, for each query head has random blocks of its own.
    middle: M.
    dropout_rate: share of weights set to zero.
    before: blocks of the M before the first that has queries here.
  """

  rows: int
  at_once: int
  kv_heads: int
  score: Product
  by_data: bool
  middle: int
  dropout_rate: float
  before: int = 0

  def visits(self, start: Array | int) -> None:
    """One visit."""
    del start

  def _near(self, place: loop.Place) -> tuple[Array | int, Array]:
    """The number of the tile itself, and that of the first near block."""
    own = place.start // self.rows + self.before
    return own, jnp.clip(own - 1, 0, self.middle - min(3, self.middle))

  def _read(
    self,
    x: Shaped[Array, "B K T F"],
    of_globals: Shaped[Array, "B K G F"],
    fixed: Limits,
    place: loop.Place,
  ) -> Shaped[Array, "B N X F"]:
    """The part of `x` that a tile sees, for every query head."""
    own, first = self._near(place)
    width = min(3, self.middle) * self.rows
    near = layout.cut(x, (first + 1) * self.rows, width, axis=2)
    shared = jnp.concatenate([of_globals, near], axis=2)
    shared = jnp.repeat(shared, self.kv_heads // x.shape[1], axis=1)
    index = _of_tile(fixed.random, own)
    return jnp.concatenate([shared, gather(x, index, self.rows)], axis=2)

  def gather(self, arrays: Arrays, fixed: Limits, place: loop.Place) -> Keys:
    """The three groups, one after another."""
    return Keys(
      self._read(arrays.key, arrays.global_key, fixed, place),
      self._read(arrays.value, arrays.global_value, fixed, place),
    )

  def limit(
    self, keys: Keys, fixed: Limits, place: loop.Place, *, is_whole: bool
  ) -> Keys:
    """Which pairs count, and which of them dropout keeps."""
    del is_whole
    batch, num_heads, width, _ = keys.key.shape
    own, first = self._near(place)
    blocks = jnp.arange(min(3, self.middle))
    near = jnp.repeat(jnp.abs(first + blocks - own) <= 1, self.rows)
    random = jnp.repeat(_of_tile(fixed.random_seen, own), self.rows, axis=1)
    num_globals = width - near.size - random.shape[1]
    near = jnp.pad(near, (num_globals, 0), constant_values=True)
    near = jnp.broadcast_to(near, (num_heads, near.size))
    visible = jnp.concatenate([near, random], axis=1)[None, :, None]
    if fixed.mask is not None:
      mask = self._read(*fixed.mask, fixed, place)[..., 0]
      visible &= mask[:, :, None]
    if fixed.query_segments is not None and fixed.key_segments is not None:
      of_query = layout.cut(fixed.query_segments, place.start, self.rows)
      of_key = self._read(*fixed.key_segments, fixed, place)[..., 0]
      visible &= of_query[:, None, :, None] == of_key[:, :, None]
    kept = None
    if self.dropout_rate:
      shape = (batch, num_heads, 1, self.rows, width)
      kept = dropout.kept(fixed.rng, self.dropout_rate, shape, place.number)
    return keys._replace(visible=visible[:, :, None], kept=kept)

  def add(
    self, totals: Arrays, gradient: Keys, fixed: Limits, place: loop.Place
  ) -> Arrays:
    """Adds the gradients of one tile at the places of its keys."""
    own, first = self._near(place)
    index = _of_tile(fixed.random, own)
    near = min(3, self.middle) * self.rows

    def spread(total, of_globals, x):
      kv_heads, num_globals = of_globals.shape[1:3]
      shared = x[:, :, : num_globals + near]
      shared = shared.reshape(x.shape[0], kv_heads, -1, *shared.shape[2:])
      shared = shared.sum(2)
      total = scatter_add(
        total, index, self.rows, x[:, :, num_globals + near :]
      )
      start = (first + 1) * self.rows
      total = layout.add(total, shared[:, :, num_globals:], start, axis=2)
      return total, of_globals + shared[:, :, :num_globals]

    key, global_key = spread(totals.key, totals.global_key, gradient.key)
    value, global_value = spread(
      totals.value, totals.global_value, gradient.value
    )
    return Arrays(key, value, global_key, global_value)


def _of_tile(x: Shaped[Array, "N M R"], i: Array | int) -> Shaped[Array, "N R"]:
  return jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)


def _starts(
  index: Int[Array, "N R"], block: int, kv_heads: int
) -> Int[Array, "K J R 1"]:
  """Where each random block starts, by key head."""
  heads, slots = index.shape
  starts = (index + 1) * block
  return starts.reshape(kv_heads, heads // kv_heads, slots, 1)


def gather(
  x: Shaped[Array, "B K T F"], index: Int[Array, "N R"], block: int
) -> Shaped[Array, "B N Y F"]:
  """The random blocks of every query head, Y = R·C.

  Heads are a batch axis of the gather. If they were one of its indices, arrays
  that are sharded by head would first be gathered whole.
  """
  batch, kv_heads, _, features = x.shape

  def of_head(x, starts):
    return jax.lax.gather(
      x,
      starts,
      jax.lax.GatherDimensionNumbers(
        offset_dims=(0, 3, 4), collapsed_slice_dims=(), start_index_map=(1,)
      ),
      (batch, block, features),
      mode="promise_in_bounds",
    )

  starts = _starts(index, block, kv_heads)
  found = jax.vmap(of_head, (1, 0), 1)(x, starts)
  heads, slots = index.shape
  return found.reshape(batch, heads, slots * block, features)


def scatter_add(
  x: Float[Array, "B K T F"],
  index: Int[Array, "N R"],
  block: int,
  updates: Float[Array, "B N Y F"],
) -> Float[Array, "B K T F"]:
  """Adds to the random blocks of every query head: the transpose of `gather`.

  It is written out because the derived transpose first makes an array like `x`.
  """
  batch, kv_heads, _, features = x.shape

  def of_head(x, starts, updates):
    return jax.lax.scatter_add(
      x,
      starts,
      updates,
      jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 3, 4),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(1,),
      ),
      mode="promise_in_bounds",
    )

  starts = _starts(index, block, kv_heads)
  updates = updates.reshape(batch, *starts.shape[:3], block, features)
  return jax.vmap(of_head, (1, 0, 1), 1)(x, starts, updates)
