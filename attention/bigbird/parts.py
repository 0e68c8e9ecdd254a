"""BigBird over a sequence in parts, one a device.

A device needs of the others the blocks beside its own part (a halo), the two global
blocks (one sum over the devices), and the random blocks of its queries. Which these
are is known to the program only while it runs, and its arrays need sizes before.
So all keys and values go round the ring, and every device keeps the blocks that its
queries ask for. Memory and time are those of BigBird; what crosses is what dense
attention sends. Fewer bytes would cross with sizes that are known while running
(`jax.lax.ragged_all_to_all`, which CPUs do not have) and D − 1 > R devices.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import arguments
from attention import sharded as parts
from attention.bigbird import blocks
from attention.bigbird.blocks import Arrays, Blocks, Known, Limits
from attention.core import halo, loop, ring, visibility
from attention.core.relative import Relative
from attention.core.tile import Product


def attention_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  block_size: int,
  random_blocks: Int[Array, "N M R"],
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`bigbird_attention` of the whole, of which each of D devices has a part.

  Args:
    query: this device's queries, T of them, which follow those of the device
      before; `key` and `value` are of the same positions.
    axis_name: of the devices, inside `jax.shard_map`.
    block_size: C, which divides T.
    random_blocks: of the whole, the same on every device.
    mask: this device's part of a key mask; segment ids likewise.
    **others: options of the whole that have no form in parts.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: a part is not a whole number of blocks, a mask varies along
      queries, or dropout.

  Cost: time and memory of BigBird on T positions, where the keys are copied for
  each query head. What crosses is D − 1 parts of keys and values, a halo of C
  positions a side, and 2C rows of queries, keys, values and results.
  """
  parts.check(
    query,
    key,
    value,
    mask,
    False,
    query_segment_ids,
    key_segment_ids,
    others,
  )
  length, num_heads, head_dim = query.shape[1:]
  if length % block_size:
    raise ValueError(
      f"block_size: expected a divisor of the {length} positions of a device, "
      f"got {block_size}; a block of a sequence in parts lies on one device"
    )
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  own = length // block_size
  keep = jnp.ones((1, length), bool) if mask is None else mask[:, 0, 0]
  keep = jnp.broadcast_to(keep, key.shape[:2])
  hides = visibility.keys(keep)
  ends = partial(_ends, block=block_size, axis_name=axis_name)

  # The blocks of the whole that are asked for, and where they are put here: after
  # a block that nobody reads, the one before this part, the part, the one after.
  numbers, seen = blocks.distinct_blocks(random_blocks)
  asked = _of_part(numbers + 1, rank * own, own)
  num_random = asked.shape[2]
  places = own + 2 + jnp.arange(own * num_random).reshape(1, own, num_random)
  one_each = ((0, 0), (1, 1), (0, 0))
  random = jnp.pad(jnp.broadcast_to(places, asked.shape), one_each)
  random_seen = jnp.pad(_of_part(seen, rank * own, own), one_each)

  def everywhere(x, collect):
    """The stretch that `Blocks` reads, for every query head."""
    near = _heads_first(
      halo.reached(x, block_size, block_size, axis_name), num_heads
    )
    far = collect(jnp.swapaxes(x, 1, 2), asked, block_size, axis_name)
    return jnp.concatenate([near[:, :, :block_size], near, far], axis=2)

  def array(x):
    x = hides.readable(x, 0)
    return everywhere(x, _collected), _heads_first(ends(x), num_heads)

  def known(x):
    x = x[:, :, None, None]
    return Known(everywhere(x, _collect), _heads_first(ends(x), num_heads))

  (keys, global_keys), (values, global_values) = array(key), array(value)
  counts = known(keep)
  # Near keys of a global block count as global alone, and beyond the sequence
  # there are none.
  near = rank * own - 2 + jnp.arange(own + 3)
  is_between = (near > 0) & (near < size * own - 1)
  is_between = jnp.pad(is_between, (0, own * num_random), constant_values=True)
  is_between = jnp.repeat(is_between, block_size)[None, None, :, None]
  counts = counts._replace(everywhere=counts.everywhere & is_between)

  query_segments = key_segments = of_ends = None
  if query_segment_ids is not None and key_segment_ids is not None:
    query_segments, key_segments = query_segment_ids, known(key_segment_ids)
    of_ends = ends(query_segment_ids)
  scaled, factor = arguments.scaled_query(query, scale)
  width = (5 + num_random) * block_size
  features = block_size + head_dim + value.shape[3]
  source = Blocks(
    rows=block_size,
    at_once=loop.at_once(
      length, block_size, 4 * len(query) * num_heads * width * features
    ),
    kv_heads=num_heads,
    score=Product(factor),
    by_data=True,
    middle=own + 2,
    dropout_rate=0.0,
    before=1,
  )
  limits = Limits(
    random, random_seen, counts, query_segments, key_segments, None
  )
  arrays = Arrays(keys, values, global_keys, global_values)
  out = loop.attend(source, scaled, arrays, Relative(), limits)

  rows = parts.attention_of_few(
    ends(query),
    key,
    value,
    axis_name=axis_name,
    mask=keep[:, None, None],
    scale=scale,
    query_segment_ids=of_ends,
    key_segment_ids=key_segment_ids,
  )
  first, last = rows[:, :block_size], rows[:, block_size:]
  first = jnp.where(rank == 0, first, out[:, :block_size])
  out = jnp.concatenate([first, out[:, block_size:]], axis=1)
  last = jnp.where(rank == size - 1, last, out[:, -block_size:])
  return jnp.concatenate([out[:, :-block_size], last], axis=1)


def _of_part(
  x: Shaped[Array, "N M R"], first: Array, own: int
) -> Shaped[Array, "N O R"]:
  """What a table of the blocks between the globals says of a device's blocks.

  Globals have no row there; theirs is 0.
  """
  rows = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
  return jax.lax.dynamic_slice_in_dim(rows, first, own, axis=1)


def _heads_first(
  x: Shaped[Array, "B T K F"], num_heads: int
) -> Shaped[Array, "B N T F"]:
  x = jnp.swapaxes(x, 1, 2)
  return jnp.repeat(x, num_heads // x.shape[1], axis=1)


def _ends(
  x: Shaped[Array, "B T *A"], block: int, axis_name: str
) -> Shaped[Array, "B G *A"]:
  """The first and the last block of the whole, on every device."""
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  number = x.astype(jnp.int32) if x.dtype == bool else x
  first = jnp.where(rank == 0, number[:, :block], 0)
  last = jnp.where(rank == size - 1, number[:, -block:], 0)
  found = jax.lax.psum(jnp.concatenate([first, last], axis=1), axis_name)
  return found.astype(x.dtype)


def _collect(
  x: Shaped[Array, "B K T F"],
  asked: Int[Array, "N O R"],
  block: int,
  axis_name: str,
) -> Shaped[Array, "B N Y F"]:
  """The blocks that each head asks for, Y = O·R·C, out of the ring."""
  index, owner_of = _wanted(asked, x.shape[2] // block)
  heads, slots = index.shape
  shape = (len(x), heads, slots * block, x.shape[3])

  def take(found, moving, owner):
    more = blocks.gather(moving, index - 1, block)
    is_here = jnp.repeat(owner_of == owner, block, axis=1)[None, :, :, None]
    return jnp.where(is_here, more, found)

  def step(carry, owner):
    moving, found = carry
    moving = ring.passed_on(moving, axis_name, size)
    return (moving, take(found, moving, owner)), None

  size = jax.lax.axis_size(axis_name)
  own, *others = _owners(axis_name)
  found = take(jnp.zeros(shape, x.dtype), x, own)
  (_, found), _ = jax.lax.scan(step, (x, found), jnp.stack(others))
  return found


_collected = jax.custom_vjp(_collect, nondiff_argnums=(2, 3))
"""`_collect` with a derivative: gradients go round the ring to their owners."""


def _collected_fwd(x, asked, block, axis_name):
  like = jnp.zeros((0, *x.shape[1:]), x.dtype)
  return _collect(x, asked, block, axis_name), (asked, like)


def _collected_bwd(block, axis_name, residuals, cotangent):
  asked, like = residuals
  index, owner_of = _wanted(asked, like.shape[2] // block)

  def give(moving, owner):
    is_theirs = jnp.repeat(owner_of == owner, block, axis=1)[None, :, :, None]
    more = jnp.where(is_theirs, cotangent, 0).astype(jnp.float32)
    return blocks.scatter_add(moving, index - 1, block, more)

  def step(moving, owner):
    return give(ring.passed_on(moving, axis_name, size), owner), None

  size = jax.lax.axis_size(axis_name)
  own, *others = _owners(axis_name)
  zeros = jnp.zeros((len(cotangent), *like.shape[1:]), jnp.float32)
  moving, _ = jax.lax.scan(step, give(zeros, own), jnp.stack(others))
  return ring.passed_on(moving, axis_name, size).astype(like.dtype), None


_collected.defvjp(_collected_fwd, _collected_bwd)


def _wanted(
  asked: Int[Array, "N O R"], own: int
) -> tuple[Int[Array, "N X"], Int[Array, "N X"]]:
  """The number of each asked block inside the part that holds it, and that part."""
  flat = asked.reshape(len(asked), -1)
  return flat % own, flat // own


def _owners(axis_name: str) -> list[Array]:
  """The device whose part is here, before and after each step of the ring."""
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  return [(rank - i) % size for i in range(size)]
