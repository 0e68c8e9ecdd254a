"""Packed sequences with an initial and a final state for each segment.

A row of T positions has up to G segments. They are rearranged so that each segment
starts with a new chunk. The state before this chunk is the segment's initial state, and
the state after its last chunk is its final state. Chunks are padded with zeros, which
leave states unchanged, and masked positions are removed. A segment of l positions needs
⌈l/C⌉ chunks; all segments need at most (T + G·(C−1)) / C, so memory is linear in T +
G·C.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.platform import layout, programs
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
  """The layout of segments in X chunks of C positions.

  Attributes:
    size: C.
    index: the new index of each position; beyond all chunks for masked positions.
    offset: the number of earlier positions of the same segment.
    is_first: whether a chunk is the first of its segment.
    segment: the segment of each chunk.
    last: the last chunk of each segment; −1 for an empty segment.
  """

  size: int
  index: Int[Array, "B T"]
  offset: Int[Array, "B T"]
  is_first: Bool[Array, "B X"]
  segment: Int[Array, "B X"]
  last: Int[Array, "B G"]

  def scatter(self, tree: Any) -> Any:
    """Rearranges arrays `[B, T, …]` to `[B, X·C, …]`, padded with zeros."""
    length = self.is_first.shape[1] * self.size

    def put(rows, index):
      zeros = jnp.zeros_like(rows, shape=(length, *rows.shape[1:]))
      return zeros.at[index].set(rows, mode="drop", unique_indices=True)

    return jax.tree.map(lambda x: jax.vmap(put)(x, self.index), tree)

  def run(
    self,
    attend: Callable[[Any, Resets], tuple[Array, Any]],
    inputs: Any,
    states: Any,
  ) -> tuple[Array, Any]:
    """Computes the results, 0 at masked positions, and the final state of each segment.

    Args:
      attend: `(inputs, resets) -> results, states after each chunk`.
      inputs: a pytree of `[B, T, …]`.
      states: a pytree of initial states `[B, G, …]`.
    """
    first = jax.tree.map(lambda x: layout.rows_at(x, self.segment), states)
    out, after = attend(self.scatter(inputs), Resets(self.is_first, first))

    def gather(rows, index):
      return rows.at[index].get(mode="fill", fill_value=0)

    def select(after, state):
      rows = layout.rows_at(after, jnp.maximum(self.last, 0))
      is_empty = self.last.reshape(*self.last.shape, *[1] * (rows.ndim - 2)) < 0
      return jnp.where(is_empty, state, rows)

    last = jax.tree.map(select, after, states)
    return jax.vmap(gather)(out, self.index), last


def pack(
  segment_ids: Int[Array, "B T"] | None,
  keep: Bool[Array, "B T"] | None,
  num_segments: int,
) -> Packing:
  """Computes the layout of the contiguous segments 0 … G−1 of each row.

  Positions with another id, such as −1, are masked.

  Raises:
    ValueError: `segment_ids` is None.
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
  is_valid = (segment_ids >= 0) & (segment_ids < num_segments)
  keep = is_valid if keep is None else keep & is_valid
  positions = jnp.arange(length)[None]
  # The last unmasked position before each, and whether its segment differs.
  before = jax.lax.cummax(jnp.where(keep, positions, -1), axis=1)
  before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  earlier = layout.rows_at(segment_ids, jnp.maximum(before, 0))
  starts = keep & ((before < 0) | (earlier != segment_ids))
  number = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - keep
  offset = number - jax.lax.cummax(jnp.where(starts, number, 0), axis=1)
  chunk_offset = offset % size
  chunk = jnp.cumsum(keep & (chunk_offset == 0), axis=1, dtype=jnp.int32) - 1
  chunk = jnp.where(keep, chunk, count)

  @jax.vmap
  def chunk_layout(chunk, starts, ids, last):
    is_first = jnp.zeros(count, bool).at[jnp.where(starts, chunk, count)]
    segment = jnp.zeros(count, ids.dtype).at[chunk].set(ids, mode="drop")
    lasts = jnp.full(num_segments, -1, jnp.int32).at[ids].max(last, mode="drop")
    return is_first.set(True, mode="drop"), segment, lasts

  last = jnp.where(keep, chunk, -1)
  chunks = chunk_layout(chunk, starts, segment_ids, last)
  index = jnp.where(keep, chunk * size + chunk_offset, count * size + positions)
  return Packing(size, index, offset, *chunks)


def make_packing(
  query: Float[Array, "B T N H"],
  num_segments: int,
  options: dict[str, Any],
) -> Packing:
  """The layout of segments with separate states; pops `segment_ids` from `options`."""
  keep = checks.key_mask(options["mask"], query, query)
  return pack(options.pop("segment_ids"), keep, num_segments)


def first_state(
  state: Float[Array, "..."] | None,
  like: Float[Array, "B T N V"],
  shape: tuple[int, ...],
  letters: str,
  num_segments: int | None,
) -> Float[Array, "B *A"]:
  """The initial state `[B, *shape]` in float32, or one per segment; None means 0.

  Raises:
    ValueError: `state` has another shape; the message calls the axes `letters`.
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
  """The initial state, a named tuple of arrays; None means the `empty` one.

  Raises:
    ValueError: it has another type, or its arrays have other shapes; the message calls
      it `what`.
  """
  if state is None:
    return empty
  if not isinstance(state, type(empty)):
    kind = programs.type_name(state)
    raise ValueError(f"initial_state: expected {what}, got {kind}")
  expected, got = (tuple(x.shape for x in y) for y in (empty, state))
  if got != expected:
    raise ValueError(f"initial_state: expected {what} of {expected}, got {got}")
  return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), state, empty)


def results(
  attend: Callable[..., tuple[Any, Any]],
  packing: Packing | None,
  inputs: Any,
  state: Float[Array, "B *G N H X"],
) -> tuple[Array, Array]:
  """The results and the last state, or with a packing the last state of each segment.

  Args:
    attend: `(inputs, state) -> last state, results`. With `resets` as a third argument,
      the results are a pair of these and the states after each chunk.
    packing: the layout of segments with separate states; None means one sequence.
    inputs: a pytree of `[B, T, …]`.
    state: from `first_state`.
  """
  if packing is None:
    last, out = attend(inputs, state)
    return out, last
  zeros = jnp.zeros_like(state, shape=(state.shape[0], *state.shape[2:]))
  return packing.run(
    lambda inputs, resets: attend(inputs, zeros, resets)[1], inputs, state
  )


def pad_to_steps(resets: Resets, count: int) -> Resets:
  """Pads resets of X chunks with zeros to whole steps of `count` chunks."""
  return jax.tree.map(lambda x: pad(x, -x.shape[1] % count), resets)


def head_resets(
  resets: Resets | None, factor: Float[Array, "B N G X Y"]
) -> Resets | None:
  """Resets for `chunk_prefixes`, to the transitions (0, state) `[B, N, G, …]`."""
  if resets is None:
    return None
  states = jnp.moveaxis(resets.states, 1, 2)
  return Resets(resets.is_reset, (jnp.zeros_like(factor), states))


def with_states(
  out: Float[Array, "B T N V"], after: Float[Array, "B N G H X"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B G N H X"]]:
  """The results, and the states after each chunk `[B, G, N, H, X]`."""
  return out, jnp.moveaxis(after, 2, 1)


def visible_positions(
  keep: Bool[Array, "B T"],
  segment_starts: Bool[Array, "B T 1 1"] | None,
  count: Int[Array, "B"],
  axis_name: str | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
  """Counts the unmasked positions of a segment before each position, and up to it.

  The first segment continues after `count` positions; `segment_starts` is that of
  `prepare_arrays`.
  """
  if segment_starts is None:
    starts = jnp.zeros_like(keep)
  else:
    starts = segment_starts[:, :, 0, 0]

  def counts(count):
    ends = jnp.cumsum(keep, axis=1, dtype=jnp.int32)
    before = ends - keep
    offset = jnp.where(starts, before, -count[:, None])
    offset = jax.lax.cummax(offset, axis=1)
    return before - offset, ends - offset

  def combine(earlier, later):
    count = later[0] + jnp.where(later[1], 0, earlier[0])
    return count, earlier[1] | later[1]

  if is_sequence_sharded(axis_name):
    own = counts(count)[1][:, -1], jnp.any(starts, axis=1)
    first = jax.tree.map(jnp.zeros_like, own)
    count, _ = device_prefix(combine, first, own, axis_name)
  return counts(count)
