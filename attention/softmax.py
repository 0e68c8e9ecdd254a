"""Softmax of rows that may be empty, and attention of gathered or projected blocks.

    out[c] = softmax over d of (scale · q_c · k_d + bias[c, d]), times v_d

The blocks of a sequence are computed some at a time, and made again in the
backward, so that memory is that of one step. Both directions of differentiation
are JAX's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for −∞, so that differences are numbers in an empty row as well."""


def block_attention(
  query: Float[Array, "*A J C H"],
  key: Float[Array, "*A D H"],
  value: Float[Array, "*A D V"],
  *,
  scale: float | Float[Array, ""] = 1.0,
  bias: Float[Array, "..."] | None = None,
  visible: Bool[Array, "..."] | None = None,
  kept: Float[Array, "..."] | None = None,
) -> Float[Array, "*A J C V"]:
  """Every query of a block attends to the visible keys of its block.

  Args:
    query: C queries of each of the J query heads of a key head.
    key: D keys, which these J heads share.
    value: of the same positions.
    scale: factor of the products, in float32 like they are.
    bias: added to the logits; `[*A, J, C, D]`, as the others, or 1 for an axis.
    visible: which pairs count; None is all.
    kept: factors of the weights, for dropout.

  Returns:
    float32; zeros with gradients of zero for a query that sees no key.

  Cost: time J·C·D·(H+V), memory J·C·D.
  """
  logits = scale * jnp.einsum(
    "...jch,...dh->...jcd", query, key, preferred_element_type=jnp.float32
  )
  if bias is not None:
    logits += bias
  if visible is not None:
    logits = jnp.where(visible, logits, _LOWEST)
  # Not below LOWEST/2: then no exponential of a hidden pair is exp(0).
  largest = jnp.maximum(jnp.max(logits, -1, keepdims=True), _LOWEST / 2)
  weights = jnp.exp(logits - jax.lax.stop_gradient(largest))
  total = jnp.sum(weights, -1, keepdims=True)
  if kept is not None:
    weights *= kept
  out = jnp.einsum(
    "...jcd,...dv->...jcv",
    weights.astype(value.dtype),
    value,
    preferred_element_type=jnp.float32,
  )
  return out / jnp.where(total == 0.0, 1.0, total)


def in_steps(
  function: Callable[..., Float[Array, "B n *F"]], at_once: int, *arrays: Any
) -> Float[Array, "B G *F"]:
  """`function` of G blocks, at most `at_once` of them in one step.

  Args:
    function: `(*arrays) -> result` of n blocks. It may read other arrays, whose
      gradients are summed over the steps.
    at_once: the most blocks in one step.
    *arrays: trees of arrays `[X, G, …]`, which are cut along G. Steps of equal
      size may need more blocks than there are; these are zeros.

  Returns:
    The results of all blocks.
  """
  count = jax.tree.leaves(arrays)[0].shape[1]
  steps = -(-count // at_once)
  size = -(-count // steps)

  def by_step(x):
    x = padded(x, steps * size - count)
    return jnp.moveaxis(x.reshape(len(x), steps, size, *x.shape[2:]), 1, 0)

  def step(arrays):
    return function(*arrays)

  step = jax.checkpoint(step, prevent_cse=False)
  out = jnp.moveaxis(jax.lax.map(step, jax.tree.map(by_step, arrays)), 0, 1)
  return out.reshape(len(out), steps * size, *out.shape[3:])[:, :count]


def padded(x: Array, *more: int) -> Array:
  """`x` with so many zeros behind each axis that follows the first."""
  rest = x.ndim - 1 - len(more)
  return jnp.pad(x, [(0, 0), *((0, n) for n in more), *[(0, 0)] * rest])


def masked_softmax(
  logits: Float[Array, "*A S"],
  allowed: Bool[Array, "..."] | None,
  sinks: Float[Array, "*A 1"] | None = None,
) -> Float[Array, "*A S"]:
  """Softmax over the last axis among `allowed`; zeros where nothing is.

  Gradients of what is not allowed and of empty rows are exact zeros too; a row
  whose logits are all -inf counts as empty. `sinks` are one more logit of each
  row, whose weight is left out.
  """
  if allowed is not None:
    logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
  if sinks is None:
    return _softmax(logits)
  return _softmax(jnp.concatenate([logits, sinks], axis=-1))[..., :-1]


@jax.custom_jvp
def _softmax(logits):
  """Softmax of rows in which the lowest finite number stands for -inf."""
  # The lowest finite number, not -inf: the difference from the maximum is then
  # a number in an empty row as well, where every exponential is 1.
  lowest = jnp.finfo(logits.dtype).min
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  exponentials = jnp.exp(logits - jnp.maximum(maximum, lowest))
  total = jnp.sum(exponentials, axis=-1, keepdims=True)
  # The total is 0 where all logits are -inf. In this order, a row with a NaN
  # counts as full and keeps it.
  weights = exponentials / jnp.where(total == 0.0, 1.0, total)
  return jnp.where(maximum <= lowest, 0.0, weights)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
  """From the weights alone: autodiff would keep the exponentials as well.

  What this saves is in benchmarks/README.md.
  """
  weights = _softmax(*primals)
  (tangent,) = tangents
  mean = jnp.sum(weights * tangent, axis=-1, keepdims=True)
  return weights, weights * (tangent - mean)
