"""Packed sequences with an initial and a final state for each segment.

A row of T positions has up to G segments. They are rearranged so that each starts a
chunk. There the state is set to the segment's initial state, and the state after its last
chunk is the final state. Chunks are padded with zeros, which change no state, and masked
positions are removed. A segment of l positions takes ⌈l/C⌉ chunks; all segments take at
most (T + G·(C−1)) / C, so memory is linear in T + G·C.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.platform import layout
from attention.platform.blocks import pad
from attention.recurrent.scan import (
  CHUNK,
  Resets,
  chunk_size,
  device_prefix,
  is_sequence_sharded,
)

_SHORTEST = 16
"""The smallest C, for rows of many short segments."""


class Packing(NamedTuple):
  """The positions of segments in X chunks of C.

  Attributes:
    size: C.
    place: new index of each position; beyond all chunks if the position is masked.
    offset: number of earlier positions of the same segment.
    opens: whether a segment starts at the chunk.
    segment: segment of each chunk.
    last: last chunk of each segment; −1 for an empty segment.
  """

  size: int
  place: Int[Array, "B T"]
  offset: Int[Array, "B T"]
  opens: Bool[Array, "B X"]
  segment: Int[Array, "B X"]
  last: Int[Array, "B G"]

  def spread(self, tree: Any) -> Any:
    """Rearranges arrays `[B, T, …]` to `[B, X·C, …]`, padded with zeros."""
    length = self.opens.shape[1] * self.size

    def put(rows, place):
      empty = jnp.zeros_like(rows, shape=(length, *rows.shape[1:]))
      return empty.at[place].set(rows, mode="drop", unique_indices=True)

    return jax.tree.map(lambda x: jax.vmap(put)(x, self.place), tree)

  def run(
    self,
    attend: Callable[[Any, Resets], tuple[Array, Any]],
    inputs: Any,
    states: Any,
  ) -> tuple[Array, Any]:
    """The results, 0 at masked positions, and the final state of each segment.

    Args:
      attend: `(inputs, resets) -> results, states after each chunk`.
      inputs: a pytree of `[B, T, …]`.
      states: a pytree of initial states `[B, G, …]`.
    """
    first = jax.tree.map(lambda x: layout.rows_at(x, self.segment), states)
    out, after = attend(self.spread(inputs), Resets(self.opens, first))

    def read(rows, place):
      return rows.at[place].get(mode="fill", fill_value=0)

    def select(after, state):
      rows = layout.rows_at(after, jnp.maximum(self.last, 0))
      is_empty = self.last.reshape(*self.last.shape, *[1] * (rows.ndim - 2)) < 0
      return jnp.where(is_empty, state, rows)

    last = jax.tree.map(select, after, states)
    return jax.vmap(read)(out, self.place), last


def pack(
  segment_ids: Int[Array, "B T"] | None,
  keep: Bool[Array, "B T"] | None,
  num_segments: int,
) -> Packing:
  """Computes the layout of the segments 0 … G−1 of each row, each contiguous.

  Positions with another id, such as −1, are masked.

  Raises:
    ValueError: there are no ids.
  """
  if segment_ids is None:
    raise ValueError(
      "num_segments: expected segment_ids [B, T] from 0 to num_segments - 1 with "
      "it, got None"
    )
  length, segment_ids = segment_ids.shape[1], segment_ids.astype(jnp.int32)
  size = min(CHUNK, max(_SHORTEST, length // num_segments))
  size = chunk_size(length, size)
  count = min((length + num_segments * (size - 1)) // size, length)
  is_there = (segment_ids >= 0) & (segment_ids < num_segments)
  keep = is_there if keep is None else keep & is_there
  places = jnp.arange(length)[None]
  # The last unmasked position before each, and whether its segment differs.
  before = jax.lax.cummax(jnp.where(keep, places, -1), axis=1)
  before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  earlier = layout.rows_at(segment_ids, jnp.maximum(before, 0))
  begins = keep & ((before < 0) | (earlier != segment_ids))
  number = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - keep
  offset = number - jax.lax.cummax(jnp.where(begins, number, 0), axis=1)
  within = offset % size
  chunk = jnp.cumsum(keep & (within == 0), axis=1, dtype=jnp.int32) - 1
  chunk = jnp.where(keep, chunk, count)

  @jax.vmap
  def by_chunk(chunk, begins, ids, last):
    opens = jnp.zeros(count, bool).at[jnp.where(begins, chunk, count)]
    segment = jnp.zeros(count, ids.dtype).at[chunk].set(ids, mode="drop")
    lasts = jnp.full(num_segments, -1, jnp.int32).at[ids].max(last, mode="drop")
    return opens.set(True, mode="drop"), segment, lasts

  last = jnp.where(keep, chunk, -1)
  found = by_chunk(chunk, begins, segment_ids, last)
  place = jnp.where(keep, chunk * size + within, count * size + places)
  return Packing(size, place, offset, *found)


def make_packing(
  query: Float[Array, "B T N H"],
  num_segments: int,
  options: dict[str, Any],
) -> Packing:
  """The layout of segments with separate states; pops their ids from the options."""
  keep = checks.key_mask(options["mask"], query, query)
  return pack(options.pop("segment_ids"), keep, num_segments)


def first_state(
  state: Float[Array, "..."] | None,
  like: Float[Array, "B T N V"],
  shape: tuple[int, ...],
  letters: str,
  num_segments: int | None,
) -> Float[Array, "B *A"]:
  """The initial state `[B, *shape]` in float32, or one per segment; None is 0.

  Raises:
    ValueError: it has another shape; the message names the axes by `letters`.
  """
  if num_segments is not None:
    shape, letters = (num_segments, *shape), f"G, {letters}"
  shape = like.shape[0], *shape
  if state is None:
    return jnp.zeros_like(like, shape=shape)
  if state.shape != shape:
    raise ValueError(
      f"initial_state: expected [B, {letters}] = {shape}, got {state.shape}"
    )
  return state.astype(jnp.float32)


def first_states(state: Any, empty: Any, what: str) -> Any:
  """The initial state, a named tuple of arrays; None is the empty one.

  Raises:
    ValueError: its arrays have other shapes; the message says `what` was expected.
  """
  if state is None:
    return empty
  expected, got = (tuple(x.shape for x in y) for y in (empty, state))
  if got != expected:
    raise ValueError(f"initial_state: expected {what} of {expected}, got {got}")
  return state


def results(
  attend: Callable[..., tuple[Any, Any]],
  packing: Packing | None,
  inputs: Any,
  state: Float[Array, "B *G N H X"],
) -> tuple[Array, Array]:
  """The results and the last state, or with a packing that of each segment.

  Args:
    attend: `(inputs, state) -> last state, results`; with `resets` the results are a
      pair of these and the states after each chunk.
    packing: of segments with separate states; None is one sequence.
    inputs: a pytree of `[B, T, …]`.
    state: from `first_state`.
  """
  if packing is None:
    last, out = attend(inputs, state)
    return out, last
  none = jnp.zeros_like(state, shape=(state.shape[0], *state.shape[2:]))
  return packing.run(
    lambda inputs, resets: attend(inputs, none, resets)[1], inputs, state
  )


def pad_to_steps(resets: Resets, count: int) -> Resets:
  """Pads resets with zeros, for steps of `count` of the X chunks."""
  return jax.tree.map(lambda x: pad(x, -x.shape[1] % count), resets)


def head_resets(
  resets: Resets | None, factor: Float[Array, "B N G X Y"]
) -> Resets | None:
  """Resets in the form of `chunk_prefixes`, to the states (0, `[B, N, G, …]`)."""
  if resets is None:
    return None
  states = jnp.moveaxis(resets.states, 1, 2)
  return Resets(resets.opens, (jnp.zeros_like(factor), states))


def with_states(
  out: Float[Array, "B T N V"], after: Float[Array, "B N G H X"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B G N H X"]]:
  """The results, and the states after each chunk."""
  return out, jnp.moveaxis(after, 2, 1)


def visible_positions(
  keep: Bool[Array, "B T"],
  begins: Bool[Array, "B T 1 1"] | None,
  count: Int[Array, "B"],
  axis_name: str | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
  """Counts the unmasked positions of its segment before each position, and up to it.

  The first segment continues from `count` positions; `begins` is that of `prepare_arrays`.
  """
  began = jnp.zeros_like(keep) if begins is None else begins[:, :, 0, 0]

  def counted(count):
    ends = jnp.cumsum(keep, axis=1, dtype=jnp.int32)
    before = ends - keep
    start = jnp.where(began, before, -count[:, None])
    start = jax.lax.cummax(start, axis=1)
    return before - start, ends - start

  def both(earlier, later):
    count = later[0] + jnp.where(later[1], 0, earlier[0])
    return count, earlier[1] | later[1]

  if is_sequence_sharded(axis_name):
    own = counted(count)[1][:, -1], jnp.any(began, axis=1)
    first = jax.tree.map(jnp.zeros_like, own)
    count, _ = device_prefix(both, first, own, axis_name)
  return counted(count)
