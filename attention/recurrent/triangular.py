"""Lower triangular matrices of a chunk: pairs of positions with decays, and inverses.

With decays g_u, a pair of a later position i and an earlier j has e^(Σ g_u over j < u ≤ i).
No exponent is above 0, because a quotient of two exponentials would overflow, and none is
a difference of two long sums that were rounded, which would lose its digits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.platform import backend

_SHORT = 8
"""Positions whose products of matrices would be smaller than what accelerators multiply."""


def pairs(
  readers: Sequence[Float[Array, "*Q G C M"]],
  keys: Sequence[Float[Array, "*A G C M"]],
  log_decay: Float[Array, "*A G C M"],
) -> list[list[Float[Array, "*Q G C C"]]]:
  """Σ_m x_im k_jm e^(Σ g_um over j < u ≤ i) where j ≤ i, 0 elsewhere; C is a power of two.

  Of each of `keys`, those of all readers x. By halves: a later and an earlier half
  split at the beginning of the later one, which makes their pairs a product of matrices.
  Halves that are too short for such a product go by distances.
  """
  size = log_decay.shape[-2]
  if size <= (1 if backend.name() == "cpu" else _SHORT):
    return _by_distance(readers, keys, log_decay)
  # Twice as many chunks, not one more axis: XLA:CPU aborts on products with eight.
  halves = jax.tree.map(
    lambda x: x.reshape(*x.shape[:-3], -1, size // 2, x.shape[-1]),
    (readers, keys, log_decay),
  )
  early, late = slice(size // 2), slice(size // 2, None)
  since = jnp.exp(_running_sum(log_decay[..., late, :], 1))
  until = jnp.exp(decay_to_end(log_decay[..., early, :]))
  across = products(
    [x[..., late, :] * since for x in readers],
    [key[..., early, :] * until for key in keys],
  )
  return jax.tree.map(triangle, pairs(*halves), across)


def _by_distance(readers, keys, log_decay):
  """`pairs` of a short chunk, those of each distance d = i − j after one another.

  The decay over d + 1 positions is that over d and one more, so no digits are lost.
  """
  size = log_decay.shape[-2]
  diagonals = [jnp.eye(size, k=-d, dtype=log_decay.dtype) for d in range(size)]
  diagonals = jnp.stack(diagonals, axis=1)
  diagonals = diagonals.reshape(*[1] * (log_decay.ndim - 2), *diagonals.shape)

  def placed(*scores):
    """`[*Q, C, C]` of the scores `[*Q, C]` of every distance."""
    return jnp.sum(jnp.stack(scores, axis=-1)[..., None] * diagonals, axis=-2)

  total, by_distance = jnp.zeros_like(log_decay), []
  for d in range(size):
    decayed = [shifted(key, d) * jnp.exp(total) for key in keys]
    by_distance.append(
      [[jnp.sum(x * key, axis=-1) for x in readers] for key in decayed]
    )
    total += shifted(log_decay, d)
  return jax.tree.map(placed, *by_distance)


def products(
  rows: Sequence[Float[Array, "*Q C M"]],
  columns: Sequence[Float[Array, "*A D M"]],
) -> list[list[Float[Array, "*Q C D"]]]:
  """For each y of `columns`, x yᵀ of each x of `rows`; those of one x are one product."""
  together = jnp.concatenate(columns, axis=-2)
  by_row = [
    jnp.split(jnp.einsum("...qm,...sm->...qs", x, together), len(columns), -1)
    for x in rows
  ]
  return [list(x) for x in zip(*by_row, strict=True)]


def decay_to_end(log_decay: Float[Array, "*A C D"]) -> Float[Array, "*A C D"]:
  """Σ over the positions after each one."""
  return _running_sum(shifted(log_decay, -1), -1)


def _running_sum(x, direction):
  """Σ of each position and all before it, or with a direction of −1 all after it.

  A windowed sum over eight positions compiles for eleven seconds for a TPU; on a CPU,
  it is faster than shifted ones.
  """
  size, distance = x.shape[-2], 1
  if size > _SHORT or backend.name() == "cpu":
    return jax.lax.cumsum(x, axis=x.ndim - 2, reverse=direction < 0)
  while distance < size:
    x, distance = x + shifted(x, direction * distance), 2 * distance
  return x


def shifted(x: Float[Array, "*A C D"], distance: int) -> Float[Array, "*A C D"]:
  """Rows so many positions later, or with a negative number earlier; zeros come in."""
  later, earlier = max(distance, 0), max(-distance, 0)
  kept = x[..., earlier : x.shape[-2] - later, :]
  return jnp.pad(kept, [(0, 0)] * (x.ndim - 2) + [(later, earlier), (0, 0)])


def triangle(
  own: Float[Array, "*A E D D"], across: Float[Array, "*A G D D"]
) -> Float[Array, "*A G C C"]:
  """[[A, 0], [X, D]] of A and D, which take turns in `own`, and X."""
  first, second = own[..., ::2, :, :], own[..., 1::2, :, :]
  return jnp.block([[first, jnp.zeros_like(across)], [across, second]])


_FORGETS = -104.0
"""The logarithm of a decay that leaves nothing in float32."""


def pair_decays(log_decay: Float[Array, "*A C 1"]) -> Float[Array, "*A C C"]:
  """e^(Σ g_u over j < u ≤ i) where j ≤ i, 1 elsewhere.

  Σ is the difference of two sums over all u ≤ i and u ≤ j, which keep their digits:
  multiples of 2⁻¹¹ up to 2¹³ are added without rounding, and what is left of each g is
  small. Decays that leave nothing are counted, not added.
  """
  forgets = log_decay < _FORGETS
  kept = jnp.where(forgets, 0.0, log_decay)
  coarse = jax.lax.stop_gradient(jnp.round(kept * 2.0**11) / 2.0**11)
  terms = coarse, kept - coarse, forgets.astype(jnp.float32)
  sums = (jnp.cumsum(x, axis=-2) for x in terms)
  coarse, fine, count = (x - jnp.swapaxes(x, -2, -1) for x in sums)
  total = jnp.where(count > 0.0, -jnp.inf, coarse + fine)
  # Not of a position and itself: its 0 would have a gradient, which rounds others away.
  is_earlier = jnp.tri(log_decay.shape[-2], k=-1, dtype=bool)
  return jnp.exp(jnp.where(is_earlier, total, 0.0))


@jax.custom_jvp
def inverse(lower: Float[Array, "B N G C C"]) -> Float[Array, "B N G C C"]:
  """(I + L)⁻¹ of L that is 0 on and above its diagonal, by halves.

    [[A, 0], [X, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ X A⁻¹, D⁻¹]]

  which is forward substitution with blocks for numbers, and as stable.
  """
  size = lower.shape[-1]
  if size <= 2:
    return jnp.eye(size, dtype=lower.dtype)[None, None, None] - lower
  half = size // 2
  own = [lower[..., :half, :half], lower[..., half:, half:]]
  own = jnp.stack(own, axis=3).reshape(*lower.shape[:2], -1, half, half)
  own = inverse(own)
  across = own[:, :, 1::2] @ lower[..., half:, :half] @ own[:, :, ::2]
  return triangle(own, -across)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
  inverted = inverse(*primals)
  return inverted, -(inverted @ tangents[0] @ inverted)
