"""Softmax over what may be attended to, of rows that may be empty."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
