"""Elementwise recurrences: every entry of a state has a decay and a write of its own.

    h_t = a_t ∘ h_{t−1} + b_t        y_t = read(x_t, h_t)

The decays and writes of all positions would take T states of memory. So `coefficients`
computes them from the inputs x_t of one chunk at a time, and for gradients only the state
before each chunk is stored (`scan`).

Within a chunk, a CPU goes position by position, where one state stays in its cache.
Other devices run an associative scan of (a, b) over the C positions, in log₂ C steps:
(a₁, b₁) followed by (a₂, b₂) is (a₁ a₂, a₂ b₁ + b₂).

Write outer products in `coefficients` as `jnp.einsum`, so that their gradients are
products of matrices: the gradient of a broadcast product is a sum that XLA:CPU fuses with
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
"""`(params, x) -> (log decay, write)`, broadcastable to the state `[…, *A]`, of inputs
`[…, *D]` of one or of several positions; 0 for inputs that are 0."""

Read = Callable[[Any, Array], Array]
"""`(x, state [..., *A]) -> y [..., *D]`."""


def elementwise_recurrence(
  coefficients: Coefficients,
  read: Read,
  params: Any,
  state: Float[Array, "B *A"],
  inputs: Any,
  begins: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T *D"], Float[Array, "B *A"]]:
  """The results y `[B, T, …]` of an elementwise recurrence, and its last state.

  Args:
    coefficients: computes log a and b; must not close over arrays.
    read: computes y; must not close over arrays.
    params: a pytree that `coefficients` gets.
    state: h before the first position.
    inputs: x, a pytree of `[B, T, …]`, 0 at masked positions, which change no state.
    begins: where h_{t−1} counts as 0; None is nowhere.

  Cost: time and memory of T inputs and results, and of C states; with gradients also
  one state for each of T / C chunks. C is `scan.CHUNK`, and on a GPU, where each level of
  an associative scan is a kernel, as many positions as fit into a step.
  """
  length = jax.tree.leaves(inputs)[0].shape[1]
  size = chunk_size(length)
  # More levels compile slowly for a TPU: mamba with gradients at T 4,096 takes 30 core
  # seconds with 512 positions and 20 with 64, and 1,934 MiB and 806.
  if backend.name() == "gpu":
    # A state, and about seven arrays of its size that an associative scan holds.
    size *= backend.tiles_per_step(32 * size * state.size, -(-length // size))
  begins = None if begins is None else begins.astype(jnp.float32)
  state, out = scan(
    functools.partial(_step, coefficients, read),
    params,
    state,
    (inputs, begins),
    size=size,
    position=functools.partial(_position, coefficients, read),
  )
  return out, state


def input_coefficients(
  params: Any, x: tuple[Array, Array]
) -> tuple[Array, Array]:
  """The `coefficients` of a recurrence whose inputs are log a and b."""
  del params
  return x


def read_state(x: Any, state: Array) -> Array:
  """The `read` of a recurrence whose result is the state."""
  del x
  return state


def _decay_and_write(coefficients, params, inputs, like):
  x, begins = inputs
  log_decay, write = coefficients(params, x)
  decay = jnp.exp(log_decay)
  if begins is not None:
    begins = begins.reshape(*begins.shape, *[1] * (decay.ndim - begins.ndim))
    decay *= 1.0 - begins
  shape = *write.shape[: write.ndim - like.ndim + 1], *like.shape[1:]
  return jnp.broadcast_to(decay, shape), jnp.broadcast_to(write, shape)


def _position(coefficients, read, params, state, inputs):
  """One position `[B, …]`."""
  decay, write = _decay_and_write(coefficients, params, inputs, state)
  state = decay * state + write
  return state, read(inputs[0], state)


def _step(coefficients, read, params, state, inputs):
  """One chunk `[B, C, …]`."""
  if backend.name() == "cpu":
    position = functools.partial(_position, coefficients, read)
    return scan_positions(position, (params, state, inputs))
  decay, write = _decay_and_write(coefficients, params, inputs, state)
  write = write.at[:, 0].add(decay[:, 0] * state)
  _, states = jax.lax.associative_scan(_join, (decay, write), axis=1)
  return states[:, -1], read(inputs[0], states)


def _join(earlier, later):
  """(a, b) of two consecutive ranges of positions."""
  return earlier[0] * later[0], later[0] * earlier[1] + later[1]
