"""What a block of `bigbird_attention` sees: global, near and random keys.

C = `block` positions make a block; of the ceil(T/C) blocks the first and the
last, which alone may be partial, are global and the M between are not. Block i,
numbered from the first of those M, sees X keys in three groups:

  global   the G ≤ 2C positions of the first and the last block,
  window   i-1, i, i+1 as far as they lie between, out of min(3, M) blocks,
  random   R blocks for each query head, gathered.

The groups share no key: the window leaves the global blocks out, and a random
block that is global, near or listed before is hidden. So one softmax over all
three is one over their union.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import blocks


class Geometry(NamedTuple):
  """What is known while tracing.

  Attributes:
    block: C, positions of a block.
    scale: factor of the logits.
    dropout_rate: share of weights set to zero.
  """

  block: int
  scale: float
  dropout_rate: float


class Operands(NamedTuple):
  """The arrays that have a derivative, at all T > 2C positions."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B T K H"]
  value: Float[Array, "B T K V"]


class Limits(NamedTuple):
  """Who sees whom beside globals and window, and what draws the dropout.

  Attributes:
    random: block numbers, as `distinct_blocks` returns them.
    random_seen: False hides a block of `random`.
    key_mask: False hides a key.
    query_segments: a query sees keys of its own segment only.
    key_segments: goes with `query_segments`.
    dropout_rng: a key; not read where the rate is 0.
  """

  random: Int[Array, "N M R"]
  random_seen: Bool[Array, "N M R"]
  key_mask: Bool[Array, "B T"] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B T"] | None
  dropout_rng: Array | None


class _Source(NamedTuple):
  """All keys, zero where they are hidden, and what hides them; A = B·K."""

  key: Float[Array, "A T H"]
  value: Float[Array, "A T V"]
  mask: Bool[Array, "B T 1"] | None
  segments: Int[Array, "B T 1"] | None


class _Group(NamedTuple):
  """Some of the keys; E is K where query heads share them, else N."""

  key: Float[Array, "B E X H"]
  value: Float[Array, "B E X V"]
  seen: Bool[Array, "#B F X"]
  segments: Int[Array, "B F X"] | None


class Keys(NamedTuple):
  """What every block is cut from, and what every block sees."""

  source: _Source
  of_globals: _Group


class Block(NamedTuple):
  """A block of queries from `start`, with all that it sees; A = B·N."""

  start: Int[Array, ""]
  first: Int[Array, ""]
  random: Int[Array, "N R"]
  query: Float[Array, "A C H"]
  key: Float[Array, "A X H"]
  value: Float[Array, "A X V"]
  allowed: Bool[Array, "#B N #C X"]


def distinct_blocks(
  random_blocks: Int[Array, "N M R"],
) -> tuple[Int[Array, "N M R"], Bool[Array, "N M R"]]:
  """Numbers from the first block between the globals, and which are to be seen.

  A block that is no block, global, in the window or listed before is not seen;
  the query's own block stands in its place, so that nothing foreign is read.
  """
  _, middle, slots = random_blocks.shape
  block = random_blocks - 1
  own = jnp.arange(middle)[None, :, None]
  seen = (block >= 0) & (block < middle) & (jnp.abs(block - own) > 1)
  same = block[..., :, None] == block[..., None, :]
  before = jnp.tri(slots, k=-1, dtype=bool)[None, None]
  seen &= ~jnp.any(same & before, axis=-1)
  return jnp.where(seen, block, own), seen


def global_rows(x: Shaped[Array, "A T *F"], block: int) -> Array:
  """The positions of the first and the last of several blocks."""
  last = (-(-x.shape[1] // block) - 1) * block
  return jnp.concatenate([x[:, :block], x[:, last:]], axis=1)


def _source(operands: Operands, limits: Limits) -> _Source:
  """Brings the keys to the form that blocks are cut from."""
  arrays = operands.key, operands.value
  mask, segments = (
    None if x is None else x[:, :, None]
    for x in (limits.key_mask, limits.key_segments)
  )
  if limits.key_mask is not None:
    # A hidden key is zeroed as well, so that not even NaN gets through.
    hidden = ~limits.key_mask[:, :, None, None]
    arrays = [jnp.where(hidden, 0, x) for x in arrays]
  key, value = (blocks.heads_first(x, x.shape[2]) for x in arrays)
  return _Source(key, value, mask, segments)


def _group(
  cut: Callable[[Array], Array],
  seen: Bool[Array, "F X"],
  source: _Source,
  batch: int,
) -> _Group:
  """One group; `cut` takes its positions out of `[A, T, F]`."""

  def by_head(x):
    x = cut(x)
    return x.reshape(batch, len(x) // batch, *x.shape[1:])

  seen, segments = seen[None], None
  if source.mask is not None:
    seen &= by_head(source.mask)[..., 0]
  if source.segments is not None:
    segments = by_head(source.segments)[..., 0]
  return _Group(by_head(source.key), by_head(source.value), seen, segments)


def prepare(geometry: Geometry, operands: Operands, limits: Limits) -> Keys:
  """All that does not depend on the block."""
  source = _source(operands, limits)
  batch, length, _, _ = operands.query.shape
  between = limits.random.shape[1] * geometry.block
  seen = jnp.ones((1, length - between), bool)
  cut = partial(global_rows, block=geometry.block)
  return Keys(source, _group(cut, seen, source, batch))


def _join(arrays: Sequence[Array], batch: int, num_heads: int) -> Array:
  """Several `[1 or B, E, X, …]` as one, every query head with its own."""
  return jnp.concatenate(
    [
      jnp.repeat(
        jnp.broadcast_to(x, (batch, *x.shape[1:])),
        num_heads // x.shape[1],
        axis=1,
      )
      for x in arrays
    ],
    axis=2,
  )


def read(
  geometry: Geometry, operands: Operands, limits: Limits, keys: Keys, i: Array
) -> Block:
  """Cuts block i and what it sees out of the whole arrays."""
  size = geometry.block
  batch, _, num_heads, _ = operands.query.shape
  middle = limits.random.shape[1]
  width = min(3, middle)
  nearest = jnp.clip(i - 1, 0, middle - width)
  start, first = (i + 1) * size, (nearest + 1) * size
  near = jnp.abs(nearest + jnp.arange(width) - i) <= 1
  random, seen = (
    jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)
    for x in (limits.random, limits.random_seen)
  )
  cut_window = partial(blocks.cut, start=first, size=width * size)
  cut_random = partial(_gather, index=random, block=size, batch=batch)
  groups = (
    keys.of_globals,
    _group(cut_window, jnp.repeat(near, size)[None], keys.source, batch),
    _group(cut_random, jnp.repeat(seen, size, axis=1), keys.source, batch),
  )
  allowed = _join(
    [x.seen for x in groups], max(len(x.seen) for x in groups), num_heads
  )[:, :, None]
  segments = [x.segments for x in groups if x.segments is not None]
  if limits.query_segments is not None:
    of_query = blocks.cut(limits.query_segments, start, size)
    of_keys = _join(segments, batch, num_heads)
    allowed &= of_query[:, None, :, None] == of_keys[:, :, None]

  def joined(arrays):
    x = _join(arrays, batch, num_heads)
    return x.reshape(batch * num_heads, *x.shape[2:])

  query = blocks.cut(operands.query, start, size)
  return Block(
    start=start,
    first=first,
    random=random,
    query=blocks.heads_first(query, num_heads),
    key=joined([x.key for x in groups]),
    value=joined([x.value for x in groups]),
    allowed=allowed,
  )


def _corners(index: Int[Array, "N R"], block: int, heads: int) -> Array:
  """`[N, R, 2]`: key head and position where each random block begins."""
  rows = index.shape[0]
  head = jnp.broadcast_to(jnp.arange(rows)[:, None], index.shape)
  return jnp.stack([head * heads // rows, (index + 1) * block], axis=-1)


def _gather(
  x: Shaped[Array, "A T F"], index: Int[Array, "N R"], block: int, batch: int
) -> Shaped[Array, "D Y F"]:
  """The random blocks of every query head, D = B·N, Y = R·C."""
  x = x.reshape(batch, -1, *x.shape[1:])
  _, heads, _, features = x.shape
  found = jax.lax.gather(
    x,
    _corners(index, block, heads),
    jax.lax.GatherDimensionNumbers(
      offset_dims=(0, 3, 4), collapsed_slice_dims=(1,), start_index_map=(1, 2)
    ),
    (batch, 1, block, features),
    mode="promise_in_bounds",
  )
  return found.reshape(batch * len(index), index.shape[1] * block, features)


def scatter_add(
  x: Float[Array, "B E T F"],
  index: Int[Array, "N R"],
  block: int,
  updates: Float[Array, "B N Y F"],
) -> Float[Array, "B E T F"]:
  """Adds to the random blocks of every query head, Y = R·C."""
  batch, heads, _, features = x.shape
  return jax.lax.scatter_add(
    x,
    _corners(index, block, heads),
    updates.reshape(batch, *index.shape, block, features),
    jax.lax.ScatterDimensionNumbers(
      update_window_dims=(0, 3, 4),
      inserted_window_dims=(1,),
      scatter_dims_to_operand_dims=(1, 2),
    ),
    mode="promise_in_bounds",
  )
