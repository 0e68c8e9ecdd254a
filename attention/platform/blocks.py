"""Blocks of positions: splitting, computing a few at a time, and joining."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def block_map(
  function: Callable[..., Any], blocks_per_step: int, *arrays: Any
) -> Any:
  """Applies `function` to each of G blocks, at most `blocks_per_step` in one step.

  Steps are recomputed in the backward pass, so that memory is that of one step.

  Args:
    function: `(*arrays) -> results` for one block. It may read other arrays, whose
      gradients are summed over the steps.
    blocks_per_step: largest number of blocks in one step.
    *arrays: pytrees of arrays `[X, G, …]` with an axis of blocks. Blocks of zeros are
      appended to make steps of equal size.

  Returns:
    The results of all blocks `[X, G, …]`.
  """
  count = jax.tree.leaves(arrays)[0].shape[1]
  steps = -(-count // blocks_per_step)
  size = -(-count // steps)

  def by_step(x):
    x = jnp.moveaxis(pad(x, steps * size - count), 1, 0)
    return x if size == 1 else x.reshape(steps, size, *x.shape[1:])

  def whole(x):
    x = x if size == 1 else x.reshape(-1, *x.shape[2:])
    return jnp.moveaxis(x[:count], 0, 1)

  # A single block has no axis of blocks, for which XLA would copy its logits.
  run = function if size == 1 else jax.vmap(function)
  step = jax.checkpoint(lambda arrays: run(*arrays), prevent_cse=False)
  return jax.tree.map(whole, jax.lax.map(step, jax.tree.map(by_step, arrays)))


def split_blocks(arrays: Any, size: int) -> Any:
  """Splits a pytree of arrays `[B, T, …]` into blocks `[B, G, C, …]`, C = `size`.

  The last block is padded with zeros.
  """

  def split(x):
    x = pad(x, -x.shape[1] % size)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])

  return jax.tree.map(split, arrays)


def chunk_map(function: Callable[..., Any], size: int, rows: Any) -> Any:
  """Applies `function` to C = `size` positions at a time of a pytree of `[B, T, …]`.

  Memory is that of one step, as in `block_map`. The results are joined along T.
  """
  length = jax.tree.leaves(rows)[0].shape[1]
  chunks = split_blocks(rows, min(size, length))
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length],
    block_map(function, 1, chunks),
  )


def join_blocks(
  x: Shaped[Array, "B G N C *H"], length: int
) -> Shaped[Array, "B T N *H"]:
  """Inverts `split_blocks`, for blocks with the head axis before the positions."""
  x = jnp.swapaxes(x, 2, 3)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def pad(x: Array, *more: int) -> Array:
  """Pads the axes after the first at their end with given numbers of zeros."""
  rest = x.ndim - 1 - len(more)
  return jnp.pad(x, [(0, 0), *((0, n) for n in more), *[(0, 0)] * rest])
