"""Hash buckets of tokens, and sorting by bucket.

Paper: Reformer, section 2, arXiv:2001.04451.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.platform import backend


def lsh_rotations(
  key: Array, *, num_rounds: int, head_dim: int, num_buckets: int
) -> Float[Array, "rounds H half"]:
  """Draws the random rotations of the hash, standard normal.

  Args:
    key: a JAX random key.
    num_rounds: the number of hash rounds, at least 1.
    head_dim: H ≥ 1.
    num_buckets: an even number, or 1 for no hashing.

  Returns:
    `[rounds, H, buckets/2]` float32; the last axis is empty for one bucket.

  Paper: arXiv:2001.04451, section 2, "Locality sensitive hashing".
  """
  checks.check_at_least("num_rounds", num_rounds, 1)
  checks.check_at_least("head_dim", head_dim, 1)
  check_buckets(num_buckets)
  return jax.random.normal(key, (num_rounds, head_dim, num_buckets // 2))


def check_buckets(num_buckets: int) -> None:
  """Raises ValueError unless the number of buckets is even, or 1."""
  checks.check_at_least("num_buckets", num_buckets, 1)
  if num_buckets > 1 and num_buckets % 2:
    raise ValueError(
      "num_buckets: expected an even number, as the hash takes a direction and "
      f"its opposite, or 1, got {num_buckets}"
    )


def hash_buckets(
  x: Float[Array, "B T N H"], rotations: Float[Array, "rounds H half"]
) -> Int[Array, "rounds B N T"]:
  """The argmax of [xR; -xR] in every round, computed for some tokens at a time."""
  batch, length, num_heads, _ = x.shape
  num_rounds, _, half = rotations.shape
  if half == 0:
    return jnp.zeros((num_rounds, batch, num_heads, length), jnp.int32)
  rotations = rotations.astype(jnp.float32)

  def bucket(x):
    # Full precision gives the same bucket on every device and in every call.
    products = jnp.einsum(
      "rhm,bnh->rmbn", rotations, x.astype(jnp.float32), precision="highest"
    )
    # On XLA:CPU, argmax along the last axis is slow.
    return jnp.argmax(jnp.concatenate([products, -products], 1), axis=1)

  token_bytes = 8 * num_rounds * half * batch * num_heads
  size = backend.rows_per_tile(token_bytes, length, least=64)
  out = jax.lax.map(bucket, jnp.swapaxes(x, 0, 1), batch_size=size)
  return jnp.moveaxis(out, 0, 3)


def sort_by_bucket(
  bucket: Int[Array, "rounds B N T"],
  segment_ids: Int[Array, "B T"] | None = None,
  keep: Bool[Array, "B T"] | None = None,
) -> tuple[Int[Array, "rounds B N T"], Int[Array, "rounds B N T"]]:
  """Sorts tokens by bucket, with each masked token in a bucket of its own at the end.

  Returns:
    The token at each place of the sorted order, and the number of earlier tokens in its
    bucket.
  """
  is_masked = None if keep is None else ~keep
  keys = [bucket] + [
    jnp.broadcast_to(x[:, None], bucket.shape)
    for x in (segment_ids, is_masked)
    if x is not None
  ]
  order = jnp.lexsort(keys)
  keys = [jnp.take_along_axis(key, order, axis=-1) for key in keys]
  place = jnp.broadcast_to(jnp.arange(order.shape[-1]), order.shape)
  is_first = place == 0 if keep is None else keys[-1]
  for key in keys:
    is_first |= key != jnp.roll(key, 1, axis=-1)
  return order, place - jax.lax.cummax(jnp.where(is_first, place, 0), axis=3)


def unsort(
  x: Int[Array, "rounds B N T"], order: Int[Array, "rounds B N T"]
) -> Int[Array, "rounds B N T"]:
  """Reorders `x` from the sorted order to the order of positions."""
  scatter = jax.vmap(
    lambda x, i: jnp.zeros_like(x).at[i].set(x, unique_indices=True)
  )
  return jax.vmap(jax.vmap(scatter))(x, order)
