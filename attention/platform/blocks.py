"""Splits sequences into blocks, maps functions over them, and joins them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def block_map(
  function: Callable[..., Any], blocks_per_step: int, *arrays: Any
) -> Any:
  """Applies `function` to each of G blocks, at most `blocks_per_step` in one step.

  Steps are recomputed in the backward pass, so only one step needs memory at a time.

  Args:
    function: `(*arrays) -> results` for one block. It may close over other arrays,
      whose gradients are summed over the steps.
    blocks_per_step: the largest number of blocks in one step.
    *arrays: pytrees of arrays `[X, G, …]` with an axis of blocks. Blocks of zeros are
      appended, so that steps have equal size.

  Returns:
    The results of all blocks `[X, G, …]`.
  """
  count = jax.tree.leaves(arrays)[0].shape[1]
  steps = -(-count // blocks_per_step)
  size = -(-count // steps)

  def split(x):
    x = jnp.moveaxis(pad(x, steps * size - count), 1, 0)
    return x if size == 1 else x.reshape(steps, size, *x.shape[1:])

  def join(x):
    x = x if size == 1 else x.reshape(-1, *x.shape[2:])
    return jnp.moveaxis(x[:count], 0, 1)

  # Without vmap for a single block: for an axis of blocks, XLA would copy its logits.
  run = function if size == 1 else jax.vmap(function)
  step = jax.checkpoint(lambda arrays: run(*arrays), prevent_cse=False)
  return jax.tree.map(join, jax.lax.map(step, jax.tree.map(split, arrays)))


def split_blocks(arrays: Any, size: int) -> Any:
  """Splits a pytree of arrays `[B, T, …]` into blocks `[B, G, C, …]`, C = `size`.

  The last block is padded with zeros.
  """

  def split(x):
    x = pad(x, -x.shape[1] % size)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])

  return jax.tree.map(split, arrays)


def chunk_map(function: Callable[..., Any], size: int, rows: Any) -> Any:
  """Applies `function` to a pytree of `[B, T, …]`, C = `size` positions at a time.

  As in `block_map`, only one step needs memory at a time. The results are joined along
  T.
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
  """Inverts `split_blocks`, for blocks whose head axis precedes the positions."""
  x = jnp.swapaxes(x, 2, 3)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def pad(x: Array, *counts: int) -> Array:
  """Appends given numbers of zeros to the second axis, the third axis, and so on."""
  rest = x.ndim - 1 - len(counts)
  return jnp.pad(x, [(0, 0), *((0, n) for n in counts), *[(0, 0)] * rest])
