"""What every block loop is made of: cut a block, multiply, put it back.

Speed. Blocks are cut out of `[B, T, N, H]` and only then brought to
[products, rows, features], where they are small enough for the cache. XLA:CPU
sends batched products of the forms 'nqd,nkd->nqk' and 'nqk,nkd->nqd' to its fast
kernel; others run at half that rate. A product of 64 rows runs at 0.6 of the rate
of one of 256 (jax 0.10.2, whose cores share each product of a batch), so blocks
are larger than a cache would want them. Scores of 64 or 128 rows over many keys
run at 1.5 to 1.7 times the rate as 'ndq,ndk->nqk', but in jax 0.12 at less than
the others: windows gain 0.08 of their time in the one and lose it in the other.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def dot(spec: str, x: Array, y: Array) -> Array:
  """An einsum of two blocks that accumulates in float32."""
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def inner(
  x: Float[Array, "*A D"], y: Float[Array, "*A D"]
) -> Float[Array, "*A 1"]:
  """Σ_d x[d] y[d] in float32.

  As the sum of a product, jax 0.10.2 takes thirty times as long: 22 ms instead
  of 0.7 for 2 million numbers.
  """
  return dot("...d,...d->...", x, y)[..., None]


def turned(x: Float[Array, "*A X Y"]) -> Float[Array, "*A Y X"]:
  """A block transposed, kept apart from the product that reads it.

  Without the barrier XLA folds the transposition into the product, which then
  misses the fast kernel.
  """
  return jax.lax.optimization_barrier(jnp.swapaxes(x, -2, -1))


def over_keys(
  x: Float[Array, "A D F"], weights: Float[Array, "A D Q"]
) -> Float[Array, "A F Q"]:
  """Σ_d x[d]ᵀ weights[d]: transposed scores by what stands at their keys.

  `x`, the smaller of the two, is turned: as 'nkd,nkq->ndq' it would run at half
  the rate.
  """
  return dot("nfd,ndq->nfq", turned(x), weights)


def largest(
  x: Float[Array, "..."], axis: int, by_mask: bool = False
) -> Float[Array, "..."]:
  """The maximum along an axis, which stays; a NaN may be passed over.

  Of the larger of a number in the first half and one in the second (of an odd
  size they share one): XLA stores what a reduction reads, and this is half as
  much. As `jnp.maximum` XLA would make two reductions of it. Not where a mask or
  segments, and not positions alone, hide some of `x` (`by_mask`): XLA cuts their
  block out of the whole for every number, which takes eight times as long.
  """
  if by_mask:
    return jnp.max(x, axis, keepdims=True)
  size = x.shape[axis]
  half = -(-size // 2)
  left = jax.lax.slice_in_dim(x, 0, half, axis=axis)
  right = jax.lax.slice_in_dim(x, size - half, size, axis=axis)
  return jnp.max(jnp.where(left > right, left, right), axis, keepdims=True)


def exponentials(
  scores: Float[Array, "A Q X"], allowed: Bool[Array, "A Q X"], by_mask: bool
) -> tuple[Float[Array, "A Q X"], Float[Array, "A Q 1"], Float[Array, "A Q 1"]]:
  """A softmax before its division: exp(x - max), its sums, log-sum-exps.

  Of a row that is allowed nothing: zeros, 0 and +inf. Scores and `allowed` should
  be broadcast, not reshaped, to one another: then XLA writes the exponentials
  over the scores. `by_mask`: see `largest`.
  """
  lowest = jnp.finfo(jnp.float32).min
  # Not below lowest/2, so that x - max is finite in a row without any.
  maximum = largest(jnp.where(allowed, scores, lowest), -1, by_mask)
  maximum = jnp.maximum(maximum, lowest / 2)
  p = jnp.where(allowed, jnp.exp(scores - maximum), 0.0)
  total = jnp.sum(p, -1, keepdims=True)
  return p, total, jnp.where(total > 0.0, maximum + jnp.log(total), jnp.inf)


def of_pairs(
  x: Shaped[Array, "#B #N #C #D"], by_head: tuple[int, ...], scores: Array
) -> Shaped[Array, "A Q D"]:
  """What is known by head, broadcast to `by_head`, for every score.

  It takes the shape of the scores, not they its: only then does XLA write their
  exponentials over them.
  """
  return jnp.broadcast_to(x, by_head).reshape(scores.shape)


def cut(x: Array, start: Array | int, size: int, axis: int = 1) -> Array:
  """`size` positions of `x` from `start`."""
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def put(x: Array, block: Array, start: Array | int) -> Array:
  """`x` with the positions from `start` replaced, in the dtype of `x`."""
  block = block.astype(x.dtype)
  return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis=1)


def add(total: Array, block: Array, start: Array | int) -> Array:
  """`total` with `block` added to the positions from `start`."""
  return put(total, block + cut(total, start, block.shape[1]), start)


def kept(
  rng: Array | None, rate: float, shape: tuple[int, ...], *numbers: Array | int
) -> Float[Array, "..."]:
  """Dropout's keep / (1 − rate) for the block that `numbers` name.

  It follows from the key and the numbers alone, so the backward draws again
  what the forward drew.
  """
  key = cast(Array, rng)
  for number in numbers:
    key = jax.random.fold_in(key, number)
  keep = 1.0 - rate
  return jax.random.bernoulli(key, keep, shape) / keep


def heads_first(
  x: Float[Array, "B C N H"], kv_heads: int
) -> Float[Array, "A Q H"]:
  """A = B·K products of Q = N/K · C rows: query heads that share a key head."""
  batch, _, _, features = x.shape
  return jnp.swapaxes(x, 1, 2).reshape(batch * kv_heads, -1, features)


def heads_last(
  x: Float[Array, "A Q H"], batch: int, rows: int
) -> Float[Array, "B C N H"]:
  """Undoes `heads_first` on blocks of C = `rows` positions."""
  return jnp.swapaxes(x.reshape(batch, -1, rows, x.shape[-1]), 1, 2)
