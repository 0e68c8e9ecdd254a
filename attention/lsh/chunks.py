"""The chunks of a round of `lsh_attention`: what they read, which pairs count.

Visible pairs. Round r sorts the tokens by bucket, and within a bucket by
position; p is a token's place in that order, and c = p // C its chunk. Token i
sees j in that round, j ∈ P_i^(r), iff both are in one bucket, j ≠ i, and

  c_i - c_j ∈ {0, 1}              in both directions,
  0 ≤ p_i - p_j < C               in the causal form.

Both are one comparison of integers, 0 ≤ code_i - code_j < width, with

  code = c + 2·bucket, width = 2   and   code = p + C·bucket, width = C,

because codes of two buckets are at least `width` apart. The code of a masked
token is at least `width` from every other code.

Axes. Rows are gathered as `[B, N, G, C, *F]`, G chunks of every head. B and N
are batch axes of every gather and never indices of one, so arrays that are
sharded along either are read in place. A gather reads each chunk of a step
together with the chunk before it. Results are written in sorted order and
gathered back through the inverse permutation, because a scatter is slow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import layout, platform

_LEAST_HEADS = 8
"""Fewer heads than this are counted as this many, because their steps would be
long and cost more memory than they save in time (benchmarks/README.md)."""


class Chunks(NamedTuple):
  """How the sorted tokens of every head are cut, known while tracing.

  Attributes:
    size: C.
    length: T.
    at_once: G, the chunks of every head in one step.
    is_causal: whether distance is counted in tokens of the bucket.
  """

  size: int
  length: int
  at_once: int
  is_causal: bool

  @property
  def steps(self) -> int:
    """The number of steps of a round."""
    return -(-self.length // (self.size * self.at_once))

  @property
  def places(self) -> int:
    """P, the length padded to whole steps."""
    return self.steps * self.at_once * self.size

  @property
  def width(self) -> int:
    """Tokens see each other where their codes are less than this apart."""
    return self.size if self.is_causal else 2


class Sorted(NamedTuple):
  """The sorted orders of all rounds; D = C + P.

  Attributes:
    order: the token at each sorted place. It begins with a chunk of arbitrary
      tokens, which the first chunk reads as the chunk before it. It is
      arbitrary again from C + T on.
    place: where in `order` a token is.
    code: the number of each token from which visibility is read.
  """

  order: Int[Array, "rounds B N D"]
  place: Int[Array, "rounds B N T"]
  code: Int[Array, "rounds B N T"]

  def round(self, r: Array) -> tuple[Int[Array, "B N D"], Int[Array, "B N T"]]:
    """The token at each place of round r, and the place of each token."""
    order, place = (
      jax.lax.dynamic_index_in_dim(x, r, keepdims=False)
      for x in (self.order, self.place)
    )
    return order, place


def cut(
  query: Float[Array, "B T N H"],
  value: Float[Array, "B T K V"],
  chunk_size: int,
  *,
  is_causal: bool,
) -> Chunks:
  """Chunks of `chunk_size`, with as many in a step as the budget allows."""
  batch, length, num_heads, head_dim = query.shape
  size = min(chunk_size, length)
  # The largest array of a chunk: its scores, or the keys or values it reads.
  widest = max(size, head_dim, value.shape[3])
  heads = max(batch * num_heads, _LEAST_HEADS)
  rows = platform.rows_at_once(
    4 * heads * 2 * widest,
    length,
    least=platform.LEAST_ROWS * _LEAST_HEADS // heads,
  )
  count, most = -(-length // size), max(rows // size, 1)
  # Steps of equal size leave the least padding.
  steps = -(-count // most)
  return Chunks(size, length, -(-count // steps), is_causal)


def rows(
  x: Shaped[Array, "B T K *F"], index: Int[Array, "B N G X"]
) -> Shaped[Array, "B N G X *F"]:
  """Rows `index` of each head n, read from head n // (N/K) of x."""
  batch, _, kv_heads, *features = x.shape
  by_kv_head = index.reshape(batch, kv_heads, -1)
  found = jax.vmap(jax.vmap(_rows, (1, 0)))(x, by_kv_head)
  return found.reshape(*index.shape, *features)


def unsort(
  x: Float[Array, "B N D *F"], place: Int[Array, "B N T"]
) -> Float[Array, "B T N *F"]:
  """Brings an array in sorted order back to the order of positions."""
  return jax.vmap(jax.vmap(_rows, out_axes=1))(x, place)


def along(
  x: Int[Array, "rounds B N T"], index: Int[Array, "rounds B N D"]
) -> Int[Array, "rounds B N D"]:
  """The entries `index` of `x`, for every round, example and head."""
  return jax.vmap(jax.vmap(jax.vmap(_rows)))(x, index)


def _rows(x, index):
  return x.at[index].get(mode="promise_in_bounds")


def windows(chunks: Chunks, x: Int[Array, "B N X"]) -> Int[Array, "B N G L"]:
  """For every chunk but the first, `x` of the chunk before it and its own."""
  x = x.reshape(*x.shape[:2], -1, chunks.size)
  return jnp.concatenate([x[:, :, :-1], x[:, :, 1:]], axis=3)


def step_windows(
  chunks: Chunks, order: Int[Array, "B N D"], i: Array
) -> Int[Array, "B N G L"]:
  """The tokens read by the chunks of step i; the second half are their own."""
  size = chunks.at_once * chunks.size
  return windows(
    chunks, layout.cut(order, i * size, size + chunks.size, axis=2)
  )


def allowed_pairs(
  chunks: Chunks, plan: Sorted, r: Array, order: Int[Array, "B N D"]
) -> Bool[Array, "B N X C L"]:
  """Which pairs of all chunks round r counts, one byte for each pair.

  A pair that an earlier round shows does not count again. The pairs are
  computed for the whole round, because XLA would compute them inside a step
  again for every use.
  """
  size, width = chunks.size, chunks.width
  place = jnp.arange(order.shape[-1])
  is_token = (place >= size) & (place < size + chunks.length)
  codes = jax.vmap(jax.vmap(jax.vmap(_rows)), (0, None))(plan.code, order)
  # Padding sees and is seen by nothing: its codes are negative, `width` apart.
  padding = jnp.broadcast_to(-width * (1 + place), codes.shape)
  codes = jnp.where(is_token, codes, padding)

  def ahead(code, counts):
    key = windows(chunks, code)[..., None, :]
    row = jnp.where(counts, code[:, :, size:], jnp.iinfo(code.dtype).min)
    # A negative difference becomes a very large unsigned number.
    return (row.reshape(*key.shape[:3], size, 1) - key).astype(jnp.uint32)

  own = jax.lax.dynamic_index_in_dim(codes, r, keepdims=False)
  allowed = ahead(own, True) < width
  is_other = size + jnp.arange(size)[:, None] != jnp.arange(2 * size)[None]
  allowed &= is_other[None, None, None]
  for before in range(codes.shape[0] - 1):
    allowed &= ahead(codes[before], before < r) >= width
  return allowed
