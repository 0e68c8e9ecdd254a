"""Logits that fall with what lies between: + Σ log f_u over s < u ≤ t.

With F_t = Σ_{u ≤ t} log f_u the term is F_t − F_s. F grows with the length, and the
difference of two long sums would lose its digits, so F is kept as two numbers, hi +
lo, of which hi is F rounded and lo what rounding took away. hi_t − hi_s of
neighbours is exact.

Paper: Forgetting transformer (FoX), arXiv:2503.02130, equation 4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def of_call(
  log_forget: Float[Array, "B T N"] | None, mask: Bool[Array, "..."] | None
) -> Float[Array, "B T N 2"] | None:
  """What is kept of the gates of a call; None where nothing is forgotten.

  A position that a mask hides from every query forgets nothing: its gate is 1, and
  so padding changes no result.
  """
  if log_forget is None:
    return None
  if mask is not None and mask.shape[2] == 1:
    log_forget = jnp.where(jnp.swapaxes(mask[:, :, 0], 1, 2), log_forget, 0.0)
  return cumulated(log_forget)


@jax.custom_jvp
def cumulated(log_forget: Float[Array, "B T N"]) -> Float[Array, "B T N 2"]:
  """(hi, lo) of F at every position, in float32 or more."""
  high = log_forget.astype(jnp.promote_types(log_forget.dtype, jnp.float32))
  pairs = high, jnp.zeros_like(high)
  return jnp.stack(jax.lax.associative_scan(_added, pairs, axis=1), axis=-1)


@cumulated.defjvp
def _cumulated_jvp(primals, tangents):
  """Rounding has no derivative: hi has that of F, and lo none."""
  found = cumulated(*primals)
  (tangent,) = tangents
  total = jnp.cumsum(tangent.astype(found.dtype), axis=1)
  return found, jnp.stack([total, jnp.zeros_like(total)], axis=-1)


def _added(x, y):
  """The sum of two pairs, as a pair (Dekker, Knuth)."""
  total = x[0] + y[0]
  other = total - x[0]
  error = (x[0] - (total - other)) + (y[0] - other) + x[1] + y[1]
  high = total + error
  return high, error - (high - total)


def between(
  of_query: Float[Array, "B C N 2"], of_key: Float[Array, "B D N 2"]
) -> Float[Array, "B N C D"]:
  """F_t − F_s of every pair, linear in both; above 0 where the key is later."""
  rows, keys = jnp.moveaxis(of_query, 2, 1), jnp.moveaxis(of_key, 2, 1)
  difference = rows[:, :, :, None] - keys[:, :, None]
  return difference[..., 0] + difference[..., 1]


def gradients(
  of_pairs: Float[Array, "B N C D"],
) -> tuple[Float[Array, "B C N 2"], Float[Array, "B D N 2"]]:
  """Those of both arguments of `between`."""

  def both(x):
    x = jnp.moveaxis(x, 1, 2)
    return jnp.stack([x, x], axis=-1)

  return both(jnp.sum(of_pairs, axis=3)), both(-jnp.sum(of_pairs, axis=2))


def after(
  kept: Float[Array, "B S N"] | None,
  log_forget: Float[Array, "B 1 N"] | None,
  is_new: Bool[Array, "B S"],
) -> Float[Array, "B S N"] | None:
  """Updates Σ log f since the position of each slot of a cache, one position later.

  Args:
    kept: before the position; None where nothing is forgotten.
    log_forget: of the position.
    is_new: the slot that it is written to.

  Raises:
    ValueError: only one of the first two is given.
  """
  if (kept is None) != (log_forget is None):
    raise ValueError(
      "log_forget: expected one in every call of a mechanism made with "
      "forget=True, and in no other"
    )
  if kept is None or log_forget is None:
    return None
  return jnp.where(is_new[..., None], 0.0, kept + log_forget)


def of_slots(
  kept: Float[Array, "B S N"] | None, bias: Float[Array, "B N 1 S"] | None
) -> Float[Array, "B N 1 S"] | None:
  """What is added to the logits of one query."""
  if kept is None:
    return bias
  more = jnp.swapaxes(kept, 1, 2)[:, :, None]
  return more if bias is None else bias + more


def since(
  log_forget: Float[Array, "B P N"], lengths: Int[Array, "B"]
) -> Float[Array, "B P N"]:
  """Σ log f between each position and the last of `lengths` positions."""
  is_read = jnp.arange(log_forget.shape[1])[None, :] < lengths[:, None]
  steps = jnp.where(is_read[..., None], log_forget.astype(jnp.float32), 0.0)
  later = jnp.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
  return later - steps
