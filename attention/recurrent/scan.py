"""Scans of a state over chunks of a sequence, and over devices.

    state, y_i = step(params, state, x_i)        i = 0, 1, …

Arrays stay `[B, T, …]`: each step slices its chunk and writes its results in place. For
gradients, the state before each chunk is stored, and everything else is recomputed in
the backward pass.

If JAX differentiated a `jax.lax.scan` of a step under `jax.checkpoint`, the chunks
would have to be the first axis, for which XLA copies every array. At T 4,096 on a CPU,
the forward pass would take 1.15 to 1.36 times as long (linear, Performer, GLA, delta
rule, KDA), gradients 0.95 to 1.23 times, and temporaries with gradients would be 1.3 to
2.0 times as large. Therefore this module has its own backward pass;
`attention.platform.derivative` adds forward mode.
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
  """The chunks, out of X, that start from a given state.

  Attributes:
    is_reset: whether a chunk starts from a given state, `[B, X]`.
    states: the given states, a pytree of `[B, X, …]`.
  """

  is_reset: Bool[Array, "B X"]
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
    params: a pytree that every step gets.
    state: the state before the first chunk, a pytree.
    xs: a pytree of `[B, T, …]`. T is that of the first leaf; longer leaves are
      truncated. The last chunk is padded with zeros, for which a step must not change
      the state. `Resets` are divided evenly among the steps.
    size: C, the number of positions in a chunk.
    is_empty: whether `state` is the empty state. If so, and if there is only one chunk,
      `step` may get None instead.
    position: the step of one position, `[B, …]`. On a CPU, it replaces `step` in calls
      without derivatives, where it is faster.

  Returns:
    The last state, and the concatenated y, a pytree of `[B, T, …]`. If a step returns
    fewer rows than positions, T is their total number.

  Cost: the time of the steps, with gradients four times that. Memory of the results;
  with gradients also one state per chunk, and the gradients of `params` and `xs`.
  """
  length = jax.tree.leaves(xs)[0].shape[1]
  count = -(-length // size)

  def pad(x):
    if isinstance(x, Resets):
      return x
    x = x[:, :length]
    missing = count * size - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

  xs = jax.tree.map(pad, xs, is_leaf=lambda x: isinstance(x, Resets))
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
  """The results, and the residuals for `_backward`: chunk numbers and states."""
  params, state, xs = arrays
  leaf = jax.tree.leaves(xs)[0]
  _, y = jax.eval_shape(step, params, state, _chunk(xs, 0, count))
  ys = jax.tree.map(
    lambda y: zeros_after(
      leaf, leaf, y.dtype, (y.shape[0], count * y.shape[1], *y.shape[2:])
    ),
    y,
  )

  def body(carry, i):
    before, ys = carry
    state, y = step(params, before, _chunk(xs, i, count))
    return (state, _write_chunk(ys, y, i)), (i, before)

  return jax.lax.scan(body, (state, ys), jnp.arange(count))


def _backward(step, count, arrays, saved, cotangents):
  """The gradients of params, state and xs."""
  params, _, xs = arrays
  d_state, d_ys = cotangents

  def body(carry, saved):
    d_params, d_state, d_xs = carry
    i, state = saved
    _, pullback = jax.vjp(step, params, state, _chunk(xs, i, count))
    d_step, d_state, d_x = pullback((d_state, _chunk(d_ys, i, count)))
    d_params = jax.tree.map(jnp.add, d_params, d_step)
    return (d_params, d_state, _write_chunk(d_xs, d_x, i)), None

  zeros = functools.partial(zeros_after, jax.tree.leaves(cotangents)[0])
  d_params, d_xs = jax.tree.map(zeros, (params, xs))
  carry = d_params, d_state, d_xs
  return jax.lax.scan(body, carry, saved, reverse=True)[0]


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
  """Chunk i of `count` equal chunks of all arrays."""
  slice_in_dim = jax.lax.dynamic_slice_in_dim
  return jax.tree.map(
    lambda x: slice_in_dim(
      x, i * (x.shape[1] // count), x.shape[1] // count, 1
    ),
    xs,
  )


def _write_chunk(xs: Tree, chunks: Tree, i: jax.Array) -> Tree:
  """Replaces chunk i of all arrays, except where a chunk is float0."""
  update, float0 = jax.lax.dynamic_update_slice_in_dim, jax.dtypes.float0
  return jax.tree.map(
    lambda x, y: x if y.dtype == float0 else update(x, y, i * y.shape[1], 1),
    xs,
    chunks,
  )


def chunk_size(length: int, block_size: int | None = None) -> int:
  """C: the smallest power of two that covers a block, or the sequence if shorter."""
  return 1 << (min(block_size or CHUNK, length) - 1).bit_length()


def chunks_per_step(x: Float[Array, "B T N D"], size: int, numbers: int) -> int:
  """The number of chunks, with `numbers` values per row, in one step of a scan.

  It is more than one only on a GPU, which a long loop of small steps would leave idle.
  On a TPU, most of the compilation would be for the prefixes of several chunks: the
  forward pass of the gated delta rule at T 4,096 compiles in 3 core seconds with one
  chunk, 6 with two and 11 with four.
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

  This is for causal mechanisms in which the score of a pair depends on all keys between
  the two. Blocks i and G − 1 − i together need G − 1 steps, so one loop of this length
  computes both: it visits no invisible block of keys, and has no conditional. If G is
  odd, block 0 is computed separately, and block i is paired with G − i.

  Args:
    start: computes the state of a block of queries for the keys at the same positions,
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
  visits, num_pairs = count - 1 + odd, count // 2
  first_states = jax.vmap(start, 1, 1)(jax.tree.map(lambda x: x[:, :odd], rows))
  if not num_pairs:
    return first_states

  def block_pairs(x):
    """Pairs of a late block G − 1 − p and an early block p, `[X, P, 2, …]`."""
    x = x[:, odd:]
    return jnp.stack([x[:, : num_pairs - 1 : -1], x[:, :num_pairs]], axis=2)

  # In each loop, the late block first visits all blocks of keys to its left, and then
  # the early block does.
  reversed_keys = jax.tree.map(
    lambda x: jnp.moveaxis(x[:, :visits][:, ::-1], 1, 0), keys
  )

  def late_visits(x, early):
    x = jnp.pad(x, [(0, visits - num_pairs)] + [(0, 0)] * (x.ndim - 1))
    return jax.lax.dynamic_slice_in_dim(x, early, visits, 0)

  def pair_states(early, own):
    early = early[0]
    late_count = visits - early

    def visit(states, x):
      i, late_keys, early_keys = x
      is_early = i >= late_count
      index = is_early.astype(jnp.int32)

      def select(x):
        return jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False)

      def block_step(state, own, late_keys, early_keys):
        block = jax.tree.map(
          lambda x, y: jnp.where(is_early, y, x), late_keys, early_keys
        )
        return step(own, state, block)

      block_step = jax.checkpoint(block_step, prevent_cse=False)
      selected = jax.tree.map(select, (states, own))
      state = block_step(*selected, late_keys, early_keys)
      return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 1),
        states,
        state,
      ), None

    late_keys = jax.tree.map(lambda x: late_visits(x, early), reversed_keys)
    xs = jnp.arange(visits), late_keys, reversed_keys
    return jax.lax.scan(visit, jax.vmap(start, 1, 1)(own), xs)[0]

  early = odd + jnp.arange(num_pairs)[None]
  states = block_map(pair_states, 1, early, jax.tree.map(block_pairs, rows))
  return jax.tree.map(
    lambda first, x: jnp.concatenate(
      [first, x[:, :, 1], x[:, ::-1, 0]], axis=1
    ),
    first_states,
    states,
  )


_MAX_STEPS = 16
"""The largest number of steps of a loop in `chunk_prefixes`."""


def chunk_prefixes(
  join: Callable[[T, T], T],
  first: T,
  own: T,
  resets: Resets | None = None,
) -> T:
  """The states before each of G chunks: `first` joined with `own` of earlier chunks.

  Axis −3 of arrays has size G in `own` and 1 in `first`. A chunk in `resets` starts
  from its given state instead. There are two loops of about √G steps: one within runs
  of √G chunks, for all runs at once, and one over the runs. They compile much faster
  than the log₂ G levels of an associative scan, and read and write less. If a loop
  would be longer than `_MAX_STEPS`, the runs are divided in the same way.
  """
  if resets is not None:
    is_reset, states = resets

    def select(x, y):
      batch, count = is_reset.shape
      shape = batch, *[1] * (y.ndim - 4), count, 1, 1
      return jnp.where(is_reset.reshape(shape), x, y)

    own = jax.tree.map(select, join(states, own), own)
    before = chunk_prefixes(join, first, own)
    return jax.tree.map(select, states, before)
  count = jax.tree.leaves(own)[0].shape[-3]
  if count == 1:
    return first
  width = min(_MAX_STEPS, 1 << ((count - 1).bit_length() + 1) // 2)
  runs = -(-count // width)

  def split_runs(x):
    padding = [(0, 0)] * (x.ndim - 3) + [(0, runs * width - count)]
    x = jnp.pad(x, [*padding, (0, 0), (0, 0)])
    x = x.reshape(*x.shape[:-3], runs, width, *x.shape[-2:])
    return jnp.moveaxis(x, -3, 0)

  def body(before, x):
    return join(before, x), before

  def join_runs(start, x):
    x = jnp.moveaxis(jnp.concatenate([start[None], x]), 0, -3)
    x = x.reshape(*x.shape[:-4], runs * width, *x.shape[-2:])
    return x[..., :count, :, :]

  first, own = match_varying((first, own))
  own = jax.tree.map(split_runs, own)
  heads = jax.tree.map(lambda x: x[0], own)
  others = jax.tree.map(lambda x: x[1:], own)
  own, prefixes = jax.lax.scan(body, heads, others)
  if runs > _MAX_STEPS:
    starts = chunk_prefixes(join, first, own)
  else:
    own = jax.tree.map(lambda x: jnp.moveaxis(x, -3, 0)[..., None, :, :], own)
    _, starts = jax.lax.scan(body, first, own)
    starts = jax.tree.map(
      lambda x: jnp.moveaxis(x[..., 0, :, :], 0, -3), starts
    )
  prefixes = jax.vmap(functools.partial(join, starts))(prefixes)
  return jax.tree.map(join_runs, starts, prefixes)


def is_sequence_sharded(axis_name: str | None) -> TypeGuard[str]:
  """Whether the sequence is sharded over several devices."""
  return axis_name is not None and jax.lax.axis_size(axis_name) > 1


def device_prefix(
  join: Callable[[T, T], T], first: T, own: T, axis_name: str
) -> T:
  """Joins `own` of all earlier devices, inside `jax.shard_map`.

  `join` is an associative function of (earlier, later). The first device gets `first`.

  Cost: ⌈log₂ D⌉ + 1 messages of the size of `own`, to the devices at distances 1, 2, 4,
  …, and finally to the next device.
  """
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def shift(tree, distance):
    pairs = [(i, i + distance) for i in range(size - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)

  def select(condition, xs, ys):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), xs, ys)

  total, distance = own, 1
  while distance < size:
    joined = join(shift(total, distance), total)
    total = select(rank >= distance, joined, total)
    distance *= 2
  return select(rank == 0, first, shift(total, 1))
