"""Cumulative log forget gates, for logits and for caches.

F_t − F_s is added to the logit of query t and key s, with F_t = Σ log f_u over u ≤ t. A
cache stores this difference for the next query.

Paper: Forgetting transformer, arXiv:2503.02130.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.recurrent.triangular import decay_to_end


def finite_log_forget(
  log_forget: Float[Array, "B T N"],
) -> Float[Array, "B T N"]:
  """Replaces the logarithm of a gate of 0 with −2²⁰.

  e^(−2²⁰) is 0 as well, and adding −2²⁰ to a sum keeps the precision of its other
  terms.
  """
  return jnp.maximum(log_forget, -(2.0**20))


def forget_sums(log_forget: Float[Array, "B T N"]) -> Float[Array, "B T N 2"]:
  """F at every position, as the sum of two numbers in float32 or more.

  F grows with the length, and the difference of two long sums would lose precision. So
  the first number is F, rounded, and the second is the rounding error. The difference
  of the first numbers of neighbours is exact.
  """
  return _forget_sums(finite_log_forget(log_forget))


@jax.custom_jvp
def _forget_sums(log_forget):
  high = log_forget.astype(jnp.promote_types(log_forget.dtype, jnp.float32))
  pairs = high, jnp.zeros_like(high)
  return jnp.stack(jax.lax.associative_scan(_pair_sum, pairs, axis=1), axis=-1)


@_forget_sums.defjvp
def _forget_sums_jvp(primals, tangents):
  """The derivative of F for the first number; 0 for the second, the rounding error."""
  sums = _forget_sums(*primals)
  total = jnp.cumsum(tangents[0].astype(sums.dtype), axis=1)
  return sums, jnp.stack([total, jnp.zeros_like(total)], axis=-1)


def _pair_sum(x, y):
  """The sum of two pairs, as a pair (Dekker, Knuth)."""
  total = x[0] + y[0]
  other = total - x[0]
  error = (x[0] - (total - other)) + (y[0] - other) + x[1] + y[1]
  high = total + error
  return high, error - (high - total)


def next_forget_bias(
  forget_bias: Float[Array, "B S N"] | None,
  log_forget: Float[Array, "B 1 N"] | None,
  is_new: Bool[Array, "B S"],
) -> Float[Array, "B S N"] | None:
  """Updates Σ log f over later positions for a new position, at `is_new` in the cache.

  Raises:
    ValueError: only one of `forget_bias` and `log_forget` is given.
  """
  if (forget_bias is None) != (log_forget is None):
    raise ValueError(
      "log_forget: expected in every call of a mechanism with forget=True, and "
      "in no other"
    )
  if forget_bias is None or log_forget is None:
    return None
  forget_bias = forget_bias + finite_log_forget(log_forget)
  return jnp.where(is_new[..., None], 0.0, forget_bias)


def prompt_forget_bias(
  log_forget: Float[Array, "B P N"],
) -> Float[Array, "B P N"]:
  """Σ log f over the positions after each one; beyond a prompt, log f is 0."""
  return decay_to_end(finite_log_forget(log_forget.astype(jnp.float32)))
