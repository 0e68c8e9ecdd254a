"""Linear attention of every query to every key, with its own backward.

The mathematics are in `state`, and the causal form is in `causal`. One loop
over blocks of keys makes the state, and one over blocks of queries reads it.
The backward has a loop over queries and then one over keys. It reads the
arguments, the result, the state, and one normaliser for each query. Features
are computed again in every block, forward and backward, and never exist for the
whole sequence.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core import platform
from attention.core.layout import heads_last, put
from attention.linear import blocks, state
from attention.linear.blocks import Steps
from attention.linear.features import FeatureMap, Operands


def attend(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  block_size: int | None,
) -> Float[Array, "B T N V"]:
  """Linear attention to all keys that count.

  Args:
    features: the feature map.
    operands: the arrays.
    keep: which keys count; None is all.
    block_size: positions of a step; None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of the query.
  """
  query_steps, key_steps = (
    _steps(x, features.size, block_size) for x in (operands.query, operands.key)
  )
  return _attend(features, query_steps, key_steps, operands, keep)


def _steps(
  x: Float[Array, "B L N H"], num_features: int, block_size: int | None
) -> Steps:
  length = x.shape[1]
  size = block_size or blocks.BLOCK
  if block_size is None:
    tile = blocks.block_bytes(x, size, num_features)
    size *= platform.tiles_at_once(tile, -(-length // size))
  count = -(-length // size)
  return Steps(length, -(-length // count), count)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
  features: FeatureMap,
  query_steps: Steps,
  key_steps: Steps,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
) -> Float[Array, "B T N V"]:
  return _forward(features, query_steps, key_steps, operands, keep)[0]


def _forward(features, query_steps, key_steps, operands, keep):
  """The result, and what the backward reads."""
  query, key, value, parameters = operands
  kv_heads = key.shape[2]

  def update(i, total):
    block = blocks.cut_keys(operands, keep, i, key_steps)
    key_features = features.of(block.key, parameters)
    return state.update(total, key_features, block.value, block.keep)

  total = state.empty(
    key.shape[0], kv_heads, features.size, value.shape[-1], features.is_log
  )
  total = jax.lax.fori_loop(0, key_steps.count, update, total)

  def read_out(i, carry):
    rows = blocks.rows_of(query, i, query_steps, kv_heads)
    read = state.read_out(total, features.of(rows, parameters))
    return tuple(
      put(whole, heads_last(x, query_steps.size), query_steps.start(i))
      for whole, x in zip(carry, state.normalised(*read), strict=True)
    )

  out = jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype)
  norm = jnp.zeros((*query.shape[:3], 1), jnp.float32)
  out, norm = jax.lax.fori_loop(0, query_steps.count, read_out, (out, norm))
  return out, (operands, keep, out, norm, total)


def _backward(features, query_steps, key_steps, residuals, cotangent):
  operands, keep, out, norm, total = residuals
  query, key, value, parameters = operands
  kv_heads = key.shape[2]

  def read_out(i, carry):
    d_query, d_sums, d_parameters = carry
    g, n = blocks.cut_cotangent(cotangent, out, norm, i, query_steps, kv_heads)
    rows = blocks.rows_of(query, i, query_steps, kv_heads)
    query_features, pullback = jax.vjp(features.of, rows, parameters)
    d_features, more = state.read_out_gradients(total, query_features, n, g)
    d_rows, of_parameters = pullback(d_features)
    return (
      blocks.put_query_rows(d_query, d_rows, i, query_steps),
      d_sums + more,
      jax.tree.map(jnp.add, d_parameters, of_parameters),
    )

  zeros = partial(jax.tree.map, jnp.zeros_like)
  d_query, d_sums, d_parameters = jax.lax.fori_loop(
    0, query_steps.count, read_out, zeros((query, total.sums, parameters))
  )

  def update(i, carry):
    d_key, d_value, d_parameters = carry
    block = blocks.cut_keys(operands, keep, i, key_steps)
    key_features, pullback = jax.vjp(features.of, block.key, parameters)
    terms = state.key_terms(total.log_scale, key_features, block.keep)
    d_features, d_value_rows = state.update_gradients(
      terms, block.value, block.keep, d_sums, features.is_log
    )
    d_key_rows, of_parameters = pullback(d_features)
    return (
      blocks.put_key_rows(d_key, d_key_rows, block),
      blocks.put_key_rows(d_value, d_value_rows, block),
      jax.tree.map(jnp.add, d_parameters, of_parameters),
    )

  d_key, d_value, d_parameters = jax.lax.fori_loop(
    0, key_steps.count, update, (*zeros((key, value)), d_parameters)
  )
  return Operands(d_query, d_key, d_value, d_parameters), None


_attend.defvjp(_forward, _backward)
