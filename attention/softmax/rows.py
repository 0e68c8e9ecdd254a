"""Softmax over rows that may be empty, and attention within blocks.

    out[c] = softmax over d of (scale · q_c · k_d + bias[c, d]), times v_d

`merge` combines results over disjoint sets of keys, and `with_sinks` adds a logit
without a value. JAX differentiates them, in forward and reverse mode.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Output = (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]
)
"""The result of an attention function: out, or (out, lse) with `return_lse`."""


def block_attention(
  query: Float[Array, "*A C N H"],
  key: Float[Array, "*A K D H"],
  value: Float[Array, "*A K D V"],
  *,
  scale: float | Float[Array, "..."] = 1.0,
  bias: Float[Array, "..."] | None = None,
  visible: Bool[Array, "..."] | None = None,
  dropout_factors: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "*A C N V"], Float[Array, "*A C N"]]:
  """Each query attends to the visible keys of its block.

  Args:
    query: C queries of N heads; query head n uses key head n // J, J = N/K.
    key: D keys; the head axis precedes the positions.
    value: the values at the same positions.
    scale: float32 factor of the products; one number, or one per pair, in the shape of
      `bias`.
    bias: added to the logits; `[*A, K, J, C, D]`, where any axis may be 1.
    visible: the visible pairs; None means all.
    dropout_factors: factors of the weights, from `dropout.factors`.

  Returns:
    out in the dtype of `query`, and the log-sum-exp of the logits in float32. For a
    query that sees no key, these are zeros, with zero gradients, and −∞.

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
  if dropout_factors is not None:
    weights *= dropout_factors
  out = jnp.einsum(
    "...kjcd,...kdv->...kjcv",
    weights.astype(value.dtype),
    value,
    preferred_element_type=jnp.float32,
  )

  def heads_last(x):
    return jnp.moveaxis(x, -2, -4).reshape(*query.shape[:-1], -1)

  return heads_last(out).astype(query.dtype), heads_last(lse[..., None])[..., 0]


def merge(
  *results: tuple[Float[Array, "B T N V"], Float[Array, "B T N"]],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """Merges the results (out, lse) over disjoint sets of keys."""
  outs, lses = zip(*results, strict=True)
  lse = jnp.stack(lses)
  largest = jnp.maximum(jnp.max(lse, 0), jnp.finfo(lse.dtype).min / 2)
  largest = jax.lax.stop_gradient(largest)
  shares = jnp.exp(lse - largest[None])
  total = jnp.sum(shares, 0)
  sees_any = total > 0.0
  total = jnp.where(sees_any, total, 1.0)
  out = sum(shares[i][..., None] * out for i, out in enumerate(outs))
  out = (out / total[..., None]).astype(outs[0].dtype)
  return out, jnp.where(sees_any, largest + jnp.log(total), -jnp.inf)


def with_sinks(
  out: Float[Array, "B T N V"],
  lse: Float[Array, "B T N"],
  sinks: Float[Array, "... N"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """Adds sinks `[N]` or `[B, T, N]`: logits that take weight but have no value.

  A sink of −∞ takes no weight.
  """
  sinks = sinks.astype(lse.dtype)
  if sinks.ndim == 1:
    sinks = sinks[None, None]
  # In an empty row, −∞ − (−∞) would be NaN, so sinks of −∞ become finite.
  is_none = sinks == -jnp.inf
  sinks = jnp.where(is_none, jnp.finfo(sinks.dtype).min / 2, sinks)
  share = jax.nn.sigmoid(lse - sinks)[..., None]
  lse = jnp.where(is_none, lse, jnp.logaddexp(lse, sinks))
  return (share * out).astype(out.dtype), lse


def softmax_and_lse(
  logits: Float[Array, "*A S"], allowed: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*A S"], Float[Array, "*A"]]:
  """Softmax over the `allowed` entries of the last axis, and their log-sum-exp.

  A row without allowed entries, or whose logits are all −∞, gets zeros and −∞, with
  zero gradients.
  """
  if allowed is not None:
    logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)
  return _softmax(logits)


def masked_softmax(
  logits: Float[Array, "*A S"], allowed: Bool[Array, "..."] | None
) -> Float[Array, "*A S"]:
  """Softmax over the `allowed` entries of the last axis; zeros for an empty row.

  Gradients of masked entries and of empty rows are exactly zero. A row whose logits are
  all −∞ counts as empty.
  """
  return softmax_and_lse(logits, allowed)[0]


@jax.custom_jvp
def _softmax(logits):
  """Softmax and log-sum-exp of rows; the lowest finite number counts as −∞."""
  # In an empty row, −∞ − (−∞) would be NaN. The lowest finite number replaces −∞, so
  # that differences are 0 and exponentials 1.
  lowest = jnp.finfo(logits.dtype).min
  maximum = jnp.max(logits, axis=-1, keepdims=True)
  largest = jnp.maximum(maximum, lowest)
  exponentials = jnp.exp(logits - largest)
  total = jnp.sum(exponentials, axis=-1, keepdims=True)
  # The total is 0 if all logits are −∞. These comparisons are False for NaN, so a row
  # with a NaN is not empty and keeps the NaN.
  total = jnp.where(total == 0.0, 1.0, total)
  is_empty = maximum <= lowest
  weights = jnp.where(is_empty, 0.0, exponentials / total)
  lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))
  return weights, lse[..., 0]


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
  """Stores only the weights; autodiff would store the exponentials as well."""
  weights, lse = _softmax(*primals)
  (tangent,) = tangents
  mean = jnp.sum(weights * tangent, axis=-1, keepdims=True)
  return (weights, lse), (weights * (tangent - mean), mean[..., 0])
