"""Linear attention of every query to every key, with its own backward.

The mathematics are in `state`, and the causal form is in `causal`. `total` is one
loop over blocks of keys, which makes the state; `read` is one over blocks of
queries, which reads it. Each has a backward of its own, a loop over the same
blocks: that of `read` gives the gradient of the state's sums, from which that of
`total` gives those of keys and values. Features are computed again in every block,
forward and backward, and never exist for the whole sequence.
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
from attention.linear.state import LinearState


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
  query, key, value, parameters = operands
  found = total(features, key, value, parameters, keep, block_size)
  return read(features, query, parameters, found, block_size)


def total(
  features: FeatureMap,
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  parameters: tuple[Array, ...],
  keep: Bool[Array, "B S"] | None,
  block_size: int | None,
) -> LinearState:
  """The state after all keys that count.

  Gradients flow through its sums; through its log-scale there is none.
  """
  steps = _steps(key, features.size, block_size)
  return _total(features, steps, key, value, parameters, keep)


def read(
  features: FeatureMap,
  query: Float[Array, "B T N H"],
  parameters: tuple[Array, ...],
  found: LinearState,
  block_size: int | None,
) -> Float[Array, "B T N V"]:
  """What every query reads of a state, in the dtype of the query."""
  steps = _steps(query, features.size, block_size)
  return _read(features, steps, query, parameters, found)


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
  features: FeatureMap,
  steps: Steps,
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  parameters: tuple[Array, ...],
  keep: Bool[Array, "B S"] | None,
) -> LinearState:
  def update(i, found):
    block = blocks.cut_keys(key, value, keep, i, steps)
    key_features = features.of(block.key, parameters)
    return state.update(found, key_features, block.value, block.keep)

  nothing = state.empty(
    len(key), key.shape[2], features.size, value.shape[-1], features.is_log
  )
  return jax.lax.fori_loop(0, steps.count, update, nothing)


def _total_forward(features, steps, key, value, parameters, keep):
  found = _total(features, steps, key, value, parameters, keep)
  return found, (key, value, parameters, keep, found.log_scale)


def _total_backward(features, steps, residuals, cotangent):
  key, value, parameters, keep, log_scale = residuals
  d_sums = cotangent.sums

  def update(i, carry):
    d_key, d_value, d_parameters = carry
    block = blocks.cut_keys(key, value, keep, i, steps)
    key_features, pullback = jax.vjp(features.of, block.key, parameters)
    terms = state.key_terms(log_scale, key_features, block.keep)
    d_features, d_value_rows = state.update_gradients(
      terms, block.value, block.keep, d_sums, features.is_log
    )
    d_key_rows, of_parameters = pullback(d_features)
    return (
      blocks.put_key_rows(d_key, d_key_rows, block),
      blocks.put_key_rows(d_value, d_value_rows, block),
      jax.tree.map(jnp.add, d_parameters, of_parameters),
    )

  zeros = jax.tree.map(jnp.zeros_like, (key, value, parameters))
  return *jax.lax.fori_loop(0, steps.count, update, zeros), None


_total.defvjp(_total_forward, _total_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _read(
  features: FeatureMap,
  steps: Steps,
  query: Float[Array, "B T N H"],
  parameters: tuple[Array, ...],
  found: LinearState,
) -> Float[Array, "B T N V"]:
  return _read_forward(features, steps, query, parameters, found)[0]


def _read_forward(features, steps, query, parameters, found):
  """The result, and what the backward reads."""
  kv_heads, width = found.sums.shape[1], found.sums.shape[2] - 1

  def read_out(i, carry):
    rows = blocks.rows_of(query, i, steps, kv_heads)
    sums = state.read_out(found, features.of(rows, parameters))
    return tuple(
      put(whole, heads_last(x, steps.size), steps.start(i))
      for whole, x in zip(carry, state.normalised(*sums), strict=True)
    )

  out = jnp.zeros((*query.shape[:3], width), query.dtype)
  norm = jnp.zeros((*query.shape[:3], 1), jnp.float32)
  out, norm = jax.lax.fori_loop(0, steps.count, read_out, (out, norm))
  return out, (query, parameters, found, out, norm)


def _read_backward(features, steps, residuals, cotangent):
  query, parameters, found, out, norm = residuals
  kv_heads = found.sums.shape[1]

  def read_out(i, carry):
    d_query, d_sums, d_parameters = carry
    g, n = blocks.cut_cotangent(cotangent, out, norm, i, steps, kv_heads)
    rows = blocks.rows_of(query, i, steps, kv_heads)
    query_features, pullback = jax.vjp(features.of, rows, parameters)
    d_features, more = state.read_out_gradients(found, query_features, n, g)
    d_rows, of_parameters = pullback(d_features)
    return (
      blocks.put_query_rows(d_query, d_rows, i, steps),
      d_sums + more,
      jax.tree.map(jnp.add, d_parameters, of_parameters),
    )

  zeros = jax.tree.map(jnp.zeros_like, (query, found.sums, parameters))
  d_query, d_sums, d_parameters = jax.lax.fori_loop(
    0, steps.count, read_out, zeros
  )
  no_scale = jax.tree.map(jnp.zeros_like, found.log_scale)
  return d_query, d_parameters, LinearState(no_scale, d_sums)


_read.defvjp(_read_forward, _read_backward)
