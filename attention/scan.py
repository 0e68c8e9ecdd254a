"""One scan over chunks of a sequence, for all mechanisms that have a state.

    state, y_i = step(params, state, x_i)        i = 0, 1, …

Arrays stay `[B, T, …]`: a chunk is cut out where it is worked on, and what comes
of it is written in place. For gradients the state before each chunk is kept,
and everything else is computed again.

`jax.lax.scan` of a step under `jax.checkpoint` computes the same in the same time,
but it wants the chunks as the first axis, for which XLA copies every array: 42 MiB
of temporaries instead of 10 (causal linear attention at T 4,096, with gradients).
That is what the backward here buys; `attention.derivative` keeps forward mode beside it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention import platform
from attention.derivative import with_backward
from attention.layout import alike

Tree = Any
"""A pytree of arrays `[B, T, …]`, or of their chunks `[B, C, …]`."""


def scan(
  step: Callable[[Any, Any, Tree], tuple[Any, Tree]],
  params: Any,
  state: Any,
  xs: Tree,
  *,
  size: int,
  is_empty: bool = False,
) -> tuple[Any, Tree]:
  """Runs `step(params, state, x) -> (state, y)` over chunks of a sequence.

  Args:
    step: of one chunk; must not close over traced arrays.
    params: a pytree that every step reads.
    state: a pytree, before the first chunk.
    xs: a pytree of `[B, T, …]`. Zeros are appended up to whole chunks: a step
      must leave the state as it is for them.
    size: C, positions of a chunk.
    is_empty: whether `state` is that of no positions. A step that is the only one
      may then be given None in its place.

  Returns:
    The last state, and the y together, a pytree of `[B, T, …]`.

  Cost: time of the steps, with gradients four times that; memory of the results, and
  for gradients one state for each chunk and gradients like `params` and `xs`.
  """
  length = jax.tree.leaves(xs)[0].shape[1]
  missing = -length % size
  count = (length + missing) // size

  def filled(x):
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

  params, state, xs = alike((params, state, jax.tree.map(filled, xs)))
  if count == 1 and platform.profile().needs_barriers:
    # Without a loop, an empty state would be a constant, of whose products XLA:CPU
    # makes wrong numbers in some versions (benchmarks/xla_cpu_fusion.py).
    if is_empty:
      state = None
    else:
      platform.warn_of_faulty_fusion()
    state, ys = jax.checkpoint(step)(params, state, xs)
  else:
    state, ys = _scan(step, size)((params, state, xs))
  return state, jax.tree.map(lambda y: y[:, :length], ys)


def _scan(step, size):
  """`_forward` with the derivative that `_backward` is."""
  return with_backward(
    lambda arrays: _forward(step, size, *arrays),
    lambda arrays, *others: _backward(step, size, *arrays, *others),
  )


def _forward(step, size, params, state, xs):
  leaf = jax.tree.leaves(xs)[0]
  count = leaf.shape[1] // size
  _, shapes = jax.eval_shape(step, params, state, _chunk(xs, 0, size))
  ys = jax.tree.map(
    lambda y: jnp.zeros_like(
      leaf, y.dtype, shape=(len(leaf), count * size, *y.shape[2:])
    ),
    shapes,
  )

  def one(carry, i):
    before, ys = carry
    state, y = step(params, before, _chunk(xs, i, size))
    return (state, _written(ys, y, i)), before

  result, states = jax.lax.scan(one, (state, ys), jnp.arange(count))
  return result, states


def _backward(step, size, params, state, xs, states, cotangents):
  del state
  d_state, d_ys = cotangents

  def one(carry, saved):
    d_params, d_state, d_xs = carry
    i, state = saved
    _, pullback = jax.vjp(step, params, state, _chunk(xs, i, size))
    more, d_state, d_x = pullback((d_state, _chunk(d_ys, i, size)))
    d_params = jax.tree.map(jnp.add, d_params, more)
    return (d_params, d_state, _written(d_xs, d_x, i)), None

  carry = (
    jax.tree.map(jnp.zeros_like, params),
    d_state,
    jax.tree.map(jnp.zeros_like, xs),
  )
  count = jax.tree.leaves(xs)[0].shape[1] // size
  saved = jnp.arange(count), states
  (d_params, d_state, d_xs), _ = jax.lax.scan(one, carry, saved, reverse=True)
  return d_params, d_state, d_xs


def _chunk(xs: Tree, i: jax.Array | int, size: int) -> Tree:
  """Chunk i of all arrays."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, 1), xs
  )


def _written(xs: Tree, chunks: Tree, i: jax.Array) -> Tree:
  """All arrays with chunk i replaced; those without a gradient as they are."""

  def one(x, chunk):
    if chunk.dtype == jax.dtypes.float0:
      return x
    start = i * chunk.shape[1]
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, start, 1)

  return jax.tree.map(one, xs, chunks)
