"""Lower triangular matrices of a chunk: scores of pairs with decays, and inverses.

With log decays g_u, the pair of a later position i and an earlier position j has the
factor e^(Σ g_u over j < u ≤ i). It is not computed as a quotient of two exponentials,
which could overflow, nor is its exponent a difference of two long rounded sums, which
would lose digits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from attention.platform import backend
from attention.platform.derivative import match_varying

_SHORT = 8
"""The largest size of chunks whose matrix products are too small for accelerators."""

LOG_ZERO = -1e30
"""The log decay that clears a state; finite, so that its sums are finite."""


def pairs(
  readers: Sequence[Float[Array, "*Q G C M"]],
  keys: Sequence[Float[Array, "*A G C M"]],
  log_decay: Float[Array, "*A G C M"],
) -> list[list[Float[Array, "*Q G C C"]]]:
  """Σ_m x_im k_jm e^(Σ g_um over j < u ≤ i) where j ≤ i, 0 elsewhere; C is a power of
  two.

  Returns, for each of `keys`, the scores of all readers x. It recursively splits the
  chunk into halves. Splitting decays at the start of the later half makes the pairs
  across halves a matrix product. Halves that are too short for matrix products are
  computed one distance at a time. On a TPU, a loop over the sizes of halves replaces the
  recursion.
  """
  size, platform = log_decay.shape[-2], backend.name()
  if platform == "tpu":
    return _by_levels(readers, keys, log_decay)
  if size <= (1 if platform == "cpu" else _SHORT):
    return _by_distance(readers, keys, log_decay)
  # Halves become chunks, without another axis: XLA:CPU aborts on products of arrays
  # with eight axes.
  halves = jax.tree.map(
    lambda x: x.reshape(*x.shape[:-3], -1, size // 2, x.shape[-1]),
    (readers, keys, log_decay),
  )
  early, late = slice(size // 2), slice(size // 2, None)
  since = jnp.exp(running_sum(log_decay[..., late, :], 1))
  until = jnp.exp(decay_to_end(log_decay[..., early, :]))
  across = products(
    [x[..., late, :] * since for x in readers],
    [key[..., early, :] * until for key in keys],
  )
  return jax.tree.map(triangle, pairs(*halves), across)


def _by_levels(readers, keys, log_decay):
  """`pairs` in a loop over the sizes of halves, by products of whole chunks."""

  def level(scores, masks):
    decay, is_own = _level_decay(masks, log_decay)
    across = products([x * decay for x in readers], [x * decay for x in keys])
    return jax.tree.map(
      lambda x, y: jnp.where(is_own, y, x), scores, across
    ), None

  shapes = jax.eval_shape(products, readers, keys)
  scores = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  scores, readers, keys, log_decay = match_varying(
    (scores, readers, keys, log_decay)
  )
  return jax.lax.scan(level, scores, _levels(log_decay.shape[-2]))[0]


def _levels(size):
  """The terms of decays within halves, and the pairs across them, `[L, C, C]` each.

  A TPU's compiler takes seconds for each short array of the recursion. Instead, a level
  computes all pairs of a chunk by one product and keeps those across halves of one size.
  This wastes operations. The first level keeps the diagonal. The decay of a position is
  that to the end of an earlier half, or from the start of a later half.
  """
  index = np.arange(size)
  xor, distance = index[:, None] ^ index, index[:, None] - index
  within, across = [np.zeros_like(xor)], [xor == 0]
  half = 1
  while half < size:
    is_later = index[:, None] // half % 2 == 1
    within.append((xor < half) & ((distance >= 0) == is_later))
    across.append((xor // half == 1) & (distance > 0))
    half *= 2
  return np.stack(within), np.stack(across)


def _level_decay(masks, log_decay):
  """The decays within the halves of a level, and the mask of its pairs."""
  within, across = masks
  return jnp.exp(_sums(within, log_decay)), across


def _by_distance(readers, keys, log_decay):
  """`pairs` of a short chunk, one distance d = i − j at a time.

  The log decay over d + 1 positions is the one over d positions plus one term, so no
  digits are lost.
  """
  size = log_decay.shape[-2]
  diagonals = [jnp.eye(size, k=-d, dtype=log_decay.dtype) for d in range(size)]
  diagonals = jnp.stack(diagonals, axis=1)
  diagonals = diagonals.reshape(*[1] * (log_decay.ndim - 2), *diagonals.shape)

  def to_matrix(*scores):
    """Combines the scores `[*Q, C]` of all distances to `[*Q, C, C]`."""
    return jnp.sum(jnp.stack(scores, axis=-1)[..., None] * diagonals, axis=-2)

  total, diagonal_scores = jnp.zeros_like(log_decay), []
  for d in range(size):
    decayed = [shift(key, d) * jnp.exp(total) for key in keys]
    diagonal_scores.append(
      [[jnp.sum(x * key, axis=-1) for x in readers] for key in decayed]
    )
    total += shift(log_decay, d)
  return jax.tree.map(to_matrix, *diagonal_scores)


def decayed_sums(
  scores: Float[Array, "*A G C C"],
  values: Float[Array, "*A G C M"],
  log_decay: Float[Array, "*A G C M"],
) -> Float[Array, "*A G C M"]:
  """Σ_j A_ij x_jm e^(Σ g_um over j < u ≤ i) over j ≤ i; C is a power of two.

  The decays are those of the channels of values, whereas in `pairs` they are those of
  the channels over which scores sum. It splits the chunk as `pairs` does.
  """
  size, platform = log_decay.shape[-2], backend.name()
  if platform == "tpu":

    def level(sums, masks):
      decay, is_own = _level_decay(masks, log_decay)
      own = jnp.where(is_own, scores, 0.0)
      return sums + decay * (own @ (values * decay)), None

    sums, scores, values, log_decay = match_varying(
      (jnp.zeros_like(values), scores, values, log_decay)
    )
    return jax.lax.scan(level, sums, _levels(size))[0]
  if size <= (1 if platform == "cpu" else _SHORT):
    total, sums = jnp.zeros_like(log_decay), jnp.zeros_like(values)
    for d in range(size):
      diagonal = jnp.diagonal(scores, -d, -2, -1)[..., None]
      diagonal = jnp.pad(
        diagonal, [(0, 0)] * (values.ndim - 2) + [(d, 0), (0, 0)]
      )
      sums += diagonal * shift(values, d) * jnp.exp(total)
      total += shift(log_decay, d)
    return sums
  half = size // 2
  early, late = slice(half), slice(half, None)
  since = jnp.exp(running_sum(log_decay[..., late, :], 1))
  until = jnp.exp(decay_to_end(log_decay[..., early, :]))
  across = scores[..., late, early] @ (values[..., early, :] * until)
  blocks = [scores[..., early, early], scores[..., late, late]]
  blocks = jnp.stack(blocks, axis=-3)
  halves = jax.tree.map(
    lambda x: x.reshape(*values.shape[:-3], -1, half, x.shape[-1]),
    (blocks, values, log_decay),
  )
  own = decayed_sums(*halves).reshape(values.shape)
  return own.at[..., late, :].add(since * across)


def products(
  rows: Sequence[Float[Array, "*Q C M"]],
  columns: Sequence[Float[Array, "*A D M"]],
) -> list[list[Float[Array, "*Q C D"]]]:
  """For each y in `columns`, x yᵀ for each x in `rows`; one product per x."""
  joined = jnp.concatenate(columns, axis=-2)
  results = [
    jnp.split(jnp.einsum("...qm,...sm->...qs", x, joined), len(columns), -1)
    for x in rows
  ]
  return [list(x) for x in zip(*results, strict=True)]


def decay_to_end(log_decay: Float[Array, "*A C D"]) -> Float[Array, "*A C D"]:
  """Σ g over the positions after each one."""
  return running_sum(shift(log_decay, -1), -1)


def running_sum(
  x: Float[Array, "*A C D"], direction: int = 1
) -> Float[Array, "*A C D"]:
  """The inclusive cumulative sum over positions; from the end if `direction` is −1.

  For a TPU, windowed sums compile slowly, so a product with a triangle of ones replaces
  them. It also adds 0 times other positions, so log decays of −∞ are made finite.
  """
  if backend.name() != "tpu":
    return jax.lax.cumsum(x, axis=x.ndim - 2, reverse=direction < 0)
  ones = np.tri(x.shape[-2])
  return _sums(ones if direction > 0 else ones.T, x)


def _sums(ones, log_decay):
  """Products of a matrix of zeros and ones with log decays."""
  ones = jnp.asarray(ones, log_decay.dtype)
  return jnp.matmul(ones, jnp.maximum(log_decay, LOG_ZERO), precision="highest")


def shift(x: Float[Array, "*A C D"], distance: int) -> Float[Array, "*A C D"]:
  """Shifts rows to later positions, or to earlier ones if negative; fills with 0."""
  later, earlier = max(distance, 0), max(-distance, 0)
  rows = x[..., earlier : x.shape[-2] - later, :]
  return jnp.pad(rows, [(0, 0)] * (x.ndim - 2) + [(later, earlier), (0, 0)])


def triangle(
  own: Float[Array, "*A E D D"], across: Float[Array, "*A G D D"]
) -> Float[Array, "*A G C C"]:
  """[[A, 0], [X, D]], with A and D alternating in `own` and X in `across`."""
  first, second = own[..., ::2, :, :], own[..., 1::2, :, :]
  return jnp.block([[first, jnp.zeros_like(across)], [across, second]])


_LOG_UNDERFLOW = -104.0
"""The logarithm of a decay that underflows to 0 in float32."""


def pair_decays(log_decay: Float[Array, "*A C 1"]) -> Float[Array, "*A C C"]:
  """e^(Σ g_u over j < u ≤ i) where j ≤ i, 1 elsewhere."""
  return jnp.exp(pair_sums(log_decay))


def pair_sums(
  log_decay: Float[Array, "*A C 1"], lowest: float = _LOG_UNDERFLOW
) -> Float[Array, "*A C C"]:
  """Σ g_u over j < u ≤ i where j ≤ i, 0 elsewhere; −∞ with any g below `lowest`.

  Σ is the difference of the sums over u ≤ i and u ≤ j, which loses no digits: multiples
  of 2⁻¹¹ up to 2¹³ are added without rounding, and the remainder of each g is small.
  Values below `lowest` are counted and not added.
  """
  is_zero = log_decay < lowest
  finite = jnp.where(is_zero, 0.0, log_decay)
  coarse = jax.lax.stop_gradient(jnp.round(finite * 2.0**11) / 2.0**11)
  terms = coarse, finite - coarse, is_zero.astype(jnp.float32)
  sums = (jnp.cumsum(x, axis=-2) for x in terms)
  coarse, fine, count = (x - jnp.swapaxes(x, -2, -1) for x in sums)
  total = jnp.where(count > 0.0, -jnp.inf, coarse + fine)
  # Without i = j, where Σ is 0: rounding would let its gradient absorb the others.
  is_earlier = jnp.tri(log_decay.shape[-2], k=-1, dtype=bool)
  return jnp.where(is_earlier, total, 0.0)


@jax.custom_jvp
def inverse(lower: Float[Array, "B N G C C"]) -> Float[Array, "B N G C C"]:
  """(I + L)⁻¹ for a strictly lower triangular L, by recursive halving.

    [[A, 0], [X, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ X A⁻¹, D⁻¹]]

  This is blocked forward substitution, and as stable. A TPU's compiler is slow with the
  recursion, so for a TPU a loop over the sizes of halves multiplies whole matrices in
  which other blocks are 0. On a GPU, that would read and write much more.
  """
  return _by_loop(lower) if backend.name() == "tpu" else _by_recursion(lower)


def _by_recursion(lower):
  size = lower.shape[-1]
  if size <= 2:
    return jnp.eye(size, dtype=lower.dtype)[None, None, None] - lower
  half = size // 2
  own = [lower[..., :half, :half], lower[..., half:, half:]]
  own = jnp.stack(own, axis=3).reshape(*lower.shape[:2], -1, half, half)
  own = _by_recursion(own)
  across = own[:, :, 1::2] @ lower[..., half:, :half] @ own[:, :, ::2]
  return triangle(own, -across)


def _by_loop(lower):
  size = lower.shape[-1]
  index = np.arange(size)[None, None, None]
  # In [2ᵏ, 2ᵏ⁺¹) for pairs across halves of size 2ᵏ.
  xor = jnp.asarray(index[..., None] ^ index[..., None, :])

  def merge(k, inverted):
    across = jnp.where(xor >> k == 1, lower, 0.0)
    return inverted - inverted @ across @ inverted

  first = jnp.where(xor == 1, -lower, (xor == 0).astype(lower.dtype))
  return jax.lax.fori_loop(1, (size - 1).bit_length(), merge, first)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
  inverted = inverse(*primals)
  return inverted, -(inverted @ tangents[0] @ inverted)
