"""Softmax of rows that may be empty, and attention of gathered or projected blocks.

    out[c] = softmax over d of (scale · q_c · k_d + bias[c, d]), times v_d

Blocks are computed some at a time (`block_map`). Both directions of
differentiation are JAX's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def block_attention(
  query: Float[Array, "*A C N H"],
  key: Float[Array, "*A K D H"],
  value: Float[Array, "*A K D V"],
  *,
  scale: float | Float[Array, "..."] = 1.0,
  bias: Float[Array, "..."] | None = None,
  visible: Bool[Array, "..."] | None = None,
  kept: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "*A C N V"], Float[Array, "*A C N"]]:
  """Every query of a block attends to the visible keys of its block.

  Args:
    query: C queries of N heads; head n reads key head n // J, J = N/K.
    key: D keys, heads first.
    value: of the same positions.
    scale: factor of the products, in float32 like they are; a number, or one for a
      pair, in the shape of `bias`.
    bias: added to the logits; `[*A, K, J, C, D]`, as the others, or 1 for an axis.
    visible: which pairs count; None is all.
    kept: factors of the weights, for dropout.

  Returns:
    out in the dtype of `query` and the log-sum-exp of the logits in float32; zeros,
    with gradients of zero, and −∞ for a query that sees no key.

  Cost: time C·D·N·(H+V), memory C·D·N.
  """
  queries = query.reshape(*query.shape[:-2], key.shape[-3], -1, query.shape[-1])
  logits = scale * jnp.einsum(
    "...kjch,...kdh->...kjcd",
    jnp.moveaxis(queries, -4, -2),
    key,
    preferred_element_type=jnp.float32,
  )
  if bias is not None:
    logits += bias
  weights, lse = softmax_and_lse(logits, visible)
  if kept is not None:
    weights *= kept
  out = jnp.einsum(
    "...kjcd,...kdv->...kjcv",
    weights.astype(value.dtype),
    value,
    preferred_element_type=jnp.float32,
  )

  def heads_last(x):
    return jnp.moveaxis(x, -2, -4).reshape(*query.shape[:-1], -1)

  return heads_last(out).astype(query.dtype), heads_last(lse[..., None])[..., 0]


def block_map(
  function: Callable[..., Any], blocks_per_step: int, *arrays: Any
) -> Any:
  """`function` of each of G blocks, at most `blocks_per_step` of them in one step.

  A step is made again in the backward, so that memory is that of one step.

  Args:
    function: `(*arrays) -> results` of one block. It may read other arrays, whose
      gradients are summed over the steps.
    blocks_per_step: the most blocks in one step.
    *arrays: trees of arrays `[X, G, …]`, each with an axis of blocks. Steps of equal
      size may need more blocks than there are; these are zeros.

  Returns:
    The results of all blocks `[X, G, …]`.
  """
  count = jax.tree.leaves(arrays)[0].shape[1]
  steps = -(-count // blocks_per_step)
  size = -(-count // steps)

  def by_step(x):
    x = jnp.moveaxis(padded(x, steps * size - count), 1, 0)
    return x if size == 1 else x.reshape(steps, size, *x.shape[1:])

  def whole(x):
    x = x if size == 1 else x.reshape(-1, *x.shape[2:])
    return jnp.moveaxis(x[:count], 0, 1)

  # One block has no axis for blocks, around which XLA would copy its logits.
  run = function if size == 1 else jax.vmap(function)
  step = jax.checkpoint(lambda arrays: run(*arrays), prevent_cse=False)
  return jax.tree.map(whole, jax.lax.map(step, jax.tree.map(by_step, arrays)))


def split_blocks(arrays: Any, size: int) -> Any:
  """Arrays `[B, T, …]` as blocks `[B, G, C, …]` of C = `size` positions.

  The last is filled up with zeros. A pytree of them keeps its structure.
  """

  def split(x):
    x = padded(x, -x.shape[1] % size)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])

  return jax.tree.map(split, arrays)


def chunk_map(function: Callable[..., Any], size: int, rows: Any) -> Any:
  """`function` of C = `size` positions at a time of a pytree of `[B, T, …]`.

  Memory is that of one step, as in `block_map`. What it returns of each C positions
  is returned of all T.
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
  """Undoes `split_blocks` on blocks with their heads first."""
  x = jnp.swapaxes(x, 2, 3)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def padded(x: Array, *more: int) -> Array:
  """`x` with so many zeros behind each axis that follows the first."""
  rest = x.ndim - 1 - len(more)
  return jnp.pad(x, [(0, 0), *((0, n) for n in more), *[(0, 0)] * rest])


def softmax_and_lse(
  logits: Float[Array, "*A S"], allowed: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*A S"], Float[Array, "*A"]]:
  """Softmax over the last axis among `allowed`, and the log-sum-exp there.

  Where nothing is allowed, or all logits are −∞, they are zeros and −∞, with
  gradients of zero.
  """
  if allowed is not None:
    logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
  return _softmax(logits)


def masked_softmax(
  logits: Float[Array, "*A S"], allowed: Bool[Array, "..."] | None
) -> Float[Array, "*A S"]:
  """Softmax over the last axis among `allowed`; zeros where nothing is.

  Gradients of what is not allowed and of empty rows are exact zeros too; a row
  whose logits are all -inf counts as empty.
  """
  return softmax_and_lse(logits, allowed)[0]


@jax.custom_jvp
def _softmax(logits):
  """Both of rows in which the lowest finite number stands for −∞."""
  # The lowest finite number, not −∞: the difference from the maximum is then
  # a number in an empty row as well, where every exponential is 1.
  lowest = jnp.finfo(logits.dtype).min
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  largest = jnp.maximum(maximum, lowest)
  exponentials = jnp.exp(logits - largest)
  total = jnp.sum(exponentials, axis=-1, keepdims=True)
  # The total is 0 where all logits are −∞. In this order, a row with a NaN
  # counts as full and keeps it.
  total = jnp.where(total == 0.0, 1.0, total)
  is_empty = maximum <= lowest
  weights = jnp.where(is_empty, 0.0, exponentials / total)
  lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))
  return weights, lse[..., 0]


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
  """From the weights alone: autodiff would keep the exponentials as well."""
  weights, lse = _softmax(*primals)
  (tangent,) = tangents
  mean = jnp.sum(weights * tangent, axis=-1, keepdims=True)
  return (weights, lse), (weights * (tangent - mean), mean[..., 0])
