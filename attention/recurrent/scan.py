"""Scans of a state over chunks of a sequence, and over devices.

    state, y_i = step(params, state, x_i)        i = 0, 1, …

Arrays stay `[B, T, …]`: each step slices its chunk, and writes its results in place.
For gradients the state before each chunk is stored, and everything else is recomputed
in the backward pass.

`jax.lax.scan` of a step under `jax.checkpoint`, differentiated by JAX, needs the chunks
as the first axis, for which XLA copies every array. At T 4,096 on a CPU its forward pass
takes 1.15 to 1.36 times as long (linear, Performer, GLA, delta rule, KDA), gradients
0.95 to 1.23 times, and temporaries with gradients are 1.3 to 2.0 times as large.
Therefore this module has its own backward pass; `attention.platform.derivative` adds
forward mode.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.platform import backend
from attention.platform.blocks import block_map
from attention.platform.derivative import match_varying, with_backward
from attention.platform.layout import zeros_after

CHUNK = 64
"""C, the number of positions of a chunk in causal forms."""

T = TypeVar("T")

Tree = Any
"""A pytree of arrays `[B, T, …]`, or of their chunks `[B, C, …]`."""


class Resets(NamedTuple):
  """Chunks, out of X, that start from a given state.

  Attributes:
    opens: whether a chunk starts from a given state, `[B, X]`.
    states: the given states, a pytree of `[B, X, …]`.
  """

  opens: Bool[Array, "B X"]
  states: Any


def scan(
  step: Callable[[Any, Any, Tree], tuple[Any, Tree]],
  params: Any,
  state: Any,
  xs: Tree,
  *,
  size: int,
  is_empty: bool = False,
  position: Callable[[Any, Any, Tree], tuple[Any, Tree]] | None = None,
) -> tuple[Any, Tree]:
  """Runs `step(params, state, x) -> (state, y)` over chunks of a sequence.

  Args:
    step: the step of one chunk; must not close over traced arrays.
    params: a pytree that every step reads.
    state: the state before the first chunk, a pytree.
    xs: a pytree of `[B, T, …]`. T is that of the first leaf; longer leaves are
      truncated. The last chunk is padded with zeros, for which a step must not change
      the state. `Resets` are divided evenly among the steps.
    size: C, the number of positions of a chunk.
    is_empty: whether `state` is the empty state. If so, and if there is only one chunk,
      `step` may get None instead.
    position: the step of one position, `[B, …]`. On a CPU it replaces `step` in calls
      without derivative, where it is faster.

  Returns:
    The last state, and the concatenated y, a pytree of `[B, T, …]`, or with the total
    number of rows of the steps.

  Cost: the time of the steps, with gradients four times that. Memory of the results;
  with gradients also one state per chunk, and the gradients of `params` and `xs`.
  """
  length = jax.tree.leaves(xs)[0].shape[1]
  count = -(-length // size)

  def whole(x):
    if isinstance(x, Resets):
      return x
    x = x[:, :length]
    missing = count * size - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

  xs = jax.tree.map(whole, xs, is_leaf=lambda x: isinstance(x, Resets))
  params, state, xs = match_varying((params, state, xs))
  if count == 1 and backend.name() == "cpu":
    # Without a loop, an empty state would be a constant, and some versions of
    # XLA:CPU compute products of constants wrongly (benchmarks/README.md).
    if is_empty:
      state = None
    state, ys = jax.checkpoint(step)(params, state, xs)
  else:
    plain = None
    if position is not None and backend.name() == "cpu":
      plain = functools.partial(scan_positions, position)
    run = with_backward(
      functools.partial(_forward, step, count),
      functools.partial(_backward, step, count),
      plain,
    )
    state, ys = run((params, state, xs))
  return state, jax.tree.map(lambda y: y[:, :length], ys)


def _forward(step, count, arrays):
  """The results, and the residuals of `_backward`: chunk numbers and states."""
  params, state, xs = arrays
  leaf = jax.tree.leaves(xs)[0]
  _, y = jax.eval_shape(step, params, state, _chunk(xs, 0, count))
  ys = jax.tree.map(
    lambda y: zeros_after(
      leaf, leaf, y.dtype, (y.shape[0], count * y.shape[1], *y.shape[2:])
    ),
    y,
  )

  def one(carry, i):
    before, ys = carry
    state, y = step(params, before, _chunk(xs, i, count))
    return (state, _write_chunk(ys, y, i)), (i, before)

  return jax.lax.scan(one, (state, ys), jnp.arange(count))


def _backward(step, count, arrays, saved, cotangents):
  params, _, xs = arrays
  d_state, d_ys = cotangents

  def one(carry, saved):
    d_params, d_state, d_xs = carry
    i, state = saved
    _, pullback = jax.vjp(step, params, state, _chunk(xs, i, count))
    more, d_state, d_x = pullback((d_state, _chunk(d_ys, i, count)))
    d_params = jax.tree.map(jnp.add, d_params, more)
    return (d_params, d_state, _write_chunk(d_xs, d_x, i)), None

  zeros = functools.partial(zeros_after, jax.tree.leaves(cotangents)[0])
  d_params, d_xs = jax.tree.map(zeros, (params, xs))
  carry = d_params, d_state, d_xs
  return jax.lax.scan(one, carry, saved, reverse=True)[0]


def scan_positions(
  position: Callable[[Any, Any, Tree], tuple[Any, Tree]],
  arrays: tuple[Any, Any, Tree],
) -> tuple[Any, Tree]:
  """Runs `position(params, state, x)` for the params, state and xs of `scan`."""
  params, state, xs = arrays
  xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
  state, ys = jax.lax.scan(functools.partial(position, params), state, xs)
  return state, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), ys)


def _chunk(xs: Tree, i: jax.Array | int, count: int) -> Tree:
  """Part i of `count` equal parts of all arrays."""
  cut = jax.lax.dynamic_slice_in_dim
  return jax.tree.map(
    lambda x: cut(x, i * (x.shape[1] // count), x.shape[1] // count, 1), xs
  )


def _write_chunk(xs: Tree, chunks: Tree, i: jax.Array) -> Tree:
  """Replaces chunk i of all arrays; arrays without gradient stay unchanged."""
  put, no_grad = jax.lax.dynamic_update_slice_in_dim, jax.dtypes.float0
  return jax.tree.map(
    lambda x, y: x if y.dtype == no_grad else put(x, y, i * y.shape[1], 1),
    xs,
    chunks,
  )


def chunk_size(length: int, block_size: int | None = None) -> int:
  """C, a power of two."""
  return 1 << (min(block_size or CHUNK, length) - 1).bit_length()


def chunks_per_step(x: Float[Array, "B T N D"], size: int, numbers: int) -> int:
  """The number of chunks, with `numbers` values per row, in one step of a scan.

  More than one on a GPU alone, which a long loop of small steps would leave idle. For a
  TPU, the prefixes of several chunks are most of the compilation: the gated delta rule
  at T 4,096 takes 3 core seconds forward with one chunk, 6 with two, 11 with four.
  """
  if backend.name() != "gpu":
    return 1
  batch, length, num_heads, _ = x.shape
  chunk_bytes = 4 * size * batch * num_heads * numbers
  return backend.tiles_per_step(chunk_bytes, -(-length // size))


def scan_leftward(
  start: Callable[[Tree], T],
  step: Callable[[Tree, T, Tree], T],
  rows: Tree,
  keys: Tree,
) -> T:
  """Scans each of G blocks of queries over the earlier blocks of keys, right to left.

    state_i = start(rows_i)
    state_i ← step(rows_i, state_i, keys_j)        j = i − 1, …, 1, 0

  for causal mechanisms whose score of a pair depends on all keys between the two.
  Blocks i and G − 1 − i together take G − 1 steps, so one loop of this length computes
  both: no step is spent on an invisible block of keys, and no step is conditional. If G
  is odd, block 0 is computed separately, and block i is paired with G − i.

  Args:
    start: computes the state of a block of queries with the keys at the same positions,
      which are part of `rows`.
    step: the step of one block of queries and one block of keys.
    rows: a pytree of blocks `[X, G, …]`.
    keys: a pytree of blocks `[X, G, …]`.

  Returns:
    The last states, with G as their second axis.

  Cost: the time of G starts and of G·(G−1)/2 steps, with gradients five times that;
  memory of the results, and for gradients the G states of one pair of blocks, without
  the parts of a state that are only accumulated.
  """
  count = jax.tree.leaves(keys)[0].shape[1]
  odd = count % 2
  visits, pairs = count - 1 + odd, count // 2
  firsts = jax.vmap(start, 1, 1)(jax.tree.map(lambda x: x[:, :odd], rows))
  if not pairs:
    return firsts

  def far_and_near(x):
    """Pairs of blocks G − 1 − p, which see more keys, and p, `[X, P, 2, …]`."""
    x = x[:, odd:]
    return jnp.stack([x[:, : pairs - 1 : -1], x[:, :pairs]], axis=2)

  # In each loop, the far block visits `far` blocks of keys to its left, and then the
  # near block visits its own.
  leftward = jax.tree.map(
    lambda x: jnp.moveaxis(x[:, :visits][:, ::-1], 1, 0), keys
  )

  def far_visits(x, near):
    x = jnp.pad(x, [(0, visits - pairs)] + [(0, 0)] * (x.ndim - 1))
    return jax.lax.dynamic_slice_in_dim(x, near, visits, 0)

  def states(near, own):
    near = near[0]
    far = visits - near

    def visit(states, x):
      i, far_keys, near_keys = x
      is_near = i >= far
      turn = is_near.astype(jnp.int32)

      def at_turn(x):
        return jax.lax.dynamic_index_in_dim(x, turn, 1, keepdims=False)

      def one(state, own, far_keys, near_keys):
        block = jax.tree.map(
          lambda x, y: jnp.where(is_near, y, x), far_keys, near_keys
        )
        return step(own, state, block)

      one = jax.checkpoint(one, prevent_cse=False)
      both = jax.tree.map(at_turn, (states, own))
      state = one(*both, far_keys, near_keys)
      return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, turn, 1),
        states,
        state,
      ), None

    far_keys = jax.tree.map(lambda x: far_visits(x, near), leftward)
    xs = jnp.arange(visits), far_keys, leftward
    return jax.lax.scan(visit, jax.vmap(start, 1, 1)(own), xs)[0]

  nears = odd + jnp.arange(pairs)[None]
  both = block_map(states, 1, nears, jax.tree.map(far_and_near, rows))
  return jax.tree.map(
    lambda first, x: jnp.concatenate(
      [first, x[:, :, 1], x[:, ::-1, 0]], axis=1
    ),
    firsts,
    both,
  )


_LONGEST = 16
"""The most steps of a loop of `chunk_prefixes`."""


def chunk_prefixes(
  join: Callable[[T, T], T],
  first: T,
  own: T,
  resets: Resets | None = None,
) -> T:
  """The states before each of G chunks: `first` joined with `own` of earlier chunks.

  The axis −3 of arrays is G in `own`, and 1 in `first`. A chunk in `resets` starts from
  its given state instead. Two loops of about √G steps each: within runs of √G chunks,
  all runs at once, and over the runs. They compile much faster than the log₂ G levels
  of an associative scan, and read and write less. Where a loop would be longer than
  `_LONGEST`, the runs are divided in the same way.
  """
  if resets is not None:
    opens, states = resets

    def select(one, other):
      batch, count = opens.shape
      shape = batch, *[1] * (other.ndim - 4), count, 1, 1
      return jnp.where(opens.reshape(shape), one, other)

    own = jax.tree.map(select, join(states, own), own)
    before = chunk_prefixes(join, first, own)
    return jax.tree.map(select, states, before)
  count = jax.tree.leaves(own)[0].shape[-3]
  if count == 1:
    return first
  width = min(_LONGEST, 1 << ((count - 1).bit_length() + 1) // 2)
  runs = -(-count // width)

  def by_place(x):
    missing = [(0, 0)] * (x.ndim - 3) + [(0, runs * width - count)]
    x = jnp.pad(x, [*missing, (0, 0), (0, 0)])
    x = x.reshape(*x.shape[:-3], runs, width, *x.shape[-2:])
    return jnp.moveaxis(x, -3, 0)

  def one(before, x):
    return join(before, x), before

  def chunks(start, x):
    x = jnp.moveaxis(jnp.concatenate([start[None], x]), 0, -3)
    x = x.reshape(*x.shape[:-4], runs * width, *x.shape[-2:])
    return x[..., :count, :, :]

  first, own = match_varying((first, own))
  own = jax.tree.map(by_place, own)
  heads = jax.tree.map(lambda x: x[0], own)
  others = jax.tree.map(lambda x: x[1:], own)
  own, within = jax.lax.scan(one, heads, others)
  if runs > _LONGEST:
    starts = chunk_prefixes(join, first, own)
  else:
    own = jax.tree.map(lambda x: jnp.moveaxis(x, -3, 0)[..., None, :, :], own)
    _, starts = jax.lax.scan(one, first, own)
    starts = jax.tree.map(
      lambda x: jnp.moveaxis(x[..., 0, :, :], 0, -3), starts
    )
  within = jax.vmap(functools.partial(join, starts))(within)
  return jax.tree.map(chunks, starts, within)


def is_sequence_sharded(axis_name: str | None) -> TypeGuard[str]:
  """Whether the call has one of several shards of a sequence."""
  return axis_name is not None and jax.lax.axis_size(axis_name) > 1


def device_prefix(
  join: Callable[[T, T], T], first: T, own: T, axis_name: str
) -> T:
  """Joins `own` of all devices before this one, inside `jax.shard_map`.

  `join` is `(earlier, later) -> both`, and associative. The first device gets `first`.

  Cost: ⌈log₂ D⌉ + 1 messages of the size of `own`, to the devices at distances 1, 2, 4,
  …, and finally to the next device.
  """
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def shift(tree, distance):
    pairs = [(i, i + distance) for i in range(size - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)

  def select(condition, one, other):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)

  total, distance = own, 1
  while distance < size:
    joined = join(shift(total, distance), total)
    total = select(rank >= distance, joined, total)
    distance *= 2
  return select(rank == 0, first, shift(total, 1))
