"""Elementwise recurrences: every entry of the state has its own decay and update.

    h_t = a_t ∘ h_{t−1} + b_t        y_t = read(x_t, h_t)

The decays a and updates b of all positions would take the memory of T states. So
`coefficients` computes them from the inputs x of one chunk at a time, and for gradients
only the state before each chunk is stored (`scan`).

Within a chunk, a CPU computes position by position, as one state fits into its cache.
Other devices run an associative scan of (a, b) over the C positions, in log₂ C steps:
(a₁, b₁) followed by (a₂, b₂) is (a₁ a₂, a₂ b₁ + b₂).

Write outer products in `coefficients` as `jnp.einsum`, so that their gradients are
matrix products: the gradient of a broadcast product is a sum that XLA:CPU fuses with
the exponential, which is slow (`benchmarks/recurrences.py`).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.platform import backend
from attention.recurrent.scan import chunk_size, scan, scan_positions

Coefficients = Callable[[Any, Any], tuple[Array, Array]]
"""`(params, x) -> (log a, b)`, broadcastable to the state `[…, *A]`, for inputs
`[…, *D]` of one or more positions; both are 0 for inputs of 0."""

Read = Callable[[Any, Array], Array]
"""`(x, state [..., *A]) -> y [..., *D]`."""


def elementwise_recurrence(
  coefficients: Coefficients,
  read: Read,
  params: Any,
  state: Float[Array, "B *A"],
  inputs: Any,
  segment_starts: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T *D"], Float[Array, "B *A"]]:
  """The results y `[B, T, …]` of an elementwise recurrence, and its last state.

  Args:
    coefficients: computes log a and b; must not close over arrays.
    read: computes y; must not close over arrays.
    params: a pytree that `coefficients` gets.
    state: h before the first position.
    inputs: x, a pytree of `[B, T, …]`, 0 at masked positions, which leave the state
      unchanged.
    segment_starts: positions at which h_{t−1} counts as 0; None means none.

  Cost: time and memory of T inputs and results, and of C states; with gradients also
  one state for each of T / C chunks. C is `scan.CHUNK`. On a GPU, where each level of
  an associative scan is a kernel, it is as many positions as fit into a step.
  """
  length = jax.tree.leaves(inputs)[0].shape[1]
  size = chunk_size(length)
  # For a TPU, more levels compile slowly: mamba with gradients at T 4,096 takes 30 core
  # seconds and 1,934 MiB with 512 positions, and 20 core seconds and 806 MiB with 64.
  if backend.name() == "gpu":
    # A state, and about seven temporary arrays of its size in an associative scan.
    size *= backend.tiles_per_step(32 * size * state.size, -(-length // size))
  if segment_starts is not None:
    segment_starts = segment_starts.astype(jnp.float32)
  state, out = scan(
    functools.partial(_step, coefficients, read),
    params,
    state,
    (inputs, segment_starts),
    size=size,
    position=functools.partial(_position, coefficients, read),
  )
  return out, state


def input_coefficients(
  params: Any, x: tuple[Array, Array]
) -> tuple[Array, Array]:
  """The `coefficients` of a recurrence with the inputs log a and b."""
  del params
  return x


def read_state(x: Any, state: Array) -> Array:
  """The `read` of a recurrence that returns its states."""
  del x
  return state


def _decay_and_update(coefficients, params, inputs, state):
  """A and b of one or more positions, broadcast to the shape of the state."""
  x, starts = inputs
  log_decay, update = coefficients(params, x)
  decay = jnp.exp(log_decay)
  if starts is not None:
    starts = starts.reshape(*starts.shape, *[1] * (decay.ndim - starts.ndim))
    decay *= 1.0 - starts
  shape = *update.shape[: update.ndim - state.ndim + 1], *state.shape[1:]
  return jnp.broadcast_to(decay, shape), jnp.broadcast_to(update, shape)


def _position(coefficients, read, params, state, inputs):
  """The step of one position `[B, …]`."""
  decay, update = _decay_and_update(coefficients, params, inputs, state)
  state = decay * state + update
  return state, read(inputs[0], state)


def _step(coefficients, read, params, state, inputs):
  """The step of one chunk `[B, C, …]`."""
  if backend.name() == "cpu":
    position = functools.partial(_position, coefficients, read)
    return scan_positions(position, (params, state, inputs))
  decay, update = _decay_and_update(coefficients, params, inputs, state)
  update = update.at[:, 0].add(decay[:, 0] * state)
  _, states = jax.lax.associative_scan(_combine, (decay, update), axis=1)
  return states[:, -1], read(inputs[0], states)


def _combine(earlier, later):
  """(a, b) of the union of two consecutive ranges of positions."""
  return earlier[0] * later[0], later[0] * earlier[1] + later[1]
