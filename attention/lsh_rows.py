"""The rows of a round of `lsh_attention`, chunk by chunk, and which pairs count.

Visible pairs. Round r sorts the tokens by bucket, and by position in a bucket;
p is a token's place in that order and c = p // C its chunk. Position i sees j
in that round, j ∈ P_i^(r), iff both are in one bucket, j ≠ i, and

  c_i - c_j ∈ {0, 1}              in both directions,
  0 ≤ p_i - p_j < C               in the causal form.

Both are one comparison of integers, 0 ≤ code_i - code_j < width, with

  code = c + 2·bucket, width = 2   and   code = p + C·bucket, width = C,

for codes of two buckets are at least `width` apart. A masked token has a code
that no other token is near.

Speed. A step gathers some chunks of every head, each with the one before, at
about the speed of a copy: to gather a chunk once and join it to the next takes
longer. A scatter would take a hundred times as long, so results are written in
sorted order and gathered back through the inverse permutation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import blocks

_PLACES, _ROWS = 512, 4096
"""What one step takes at most of a head and of all, in whole chunks. XLA:CPU
takes 0.75 of the time that it does with one chunk of 8 heads, 512 rows, and more
again from 8,192 rows on."""


class Plan(NamedTuple):
  """The sorted orders of all rounds; D = C + P, P the length padded to C.

  Attributes:
    order: the token at each sorted place; a chunk of anything comes first, for
      the first chunk to look back on, and anything from C + T on.
    place: where in `order` a token is.
    code: what visibility is read from, per token.
    dropout_rng: key of the dropout.
  """

  order: Int[Array, "rounds B N D"]
  place: Int[Array, "rounds B N T"]
  code: Int[Array, "rounds B N T"]
  dropout_rng: Array | None = None


class Geometry(NamedTuple):
  """What is known while tracing: C, the `width` of visible codes, the rate."""

  chunk_size: int
  width: int
  dropout_rate: float


class Operands(NamedTuple):
  """The arrays that have a derivative; `column` is scale / |x|."""

  vector: Float[Array, "B T N H"]
  column: Float[Array, "B T N"]
  value: Float[Array, "B T K V"]


class Chunks(NamedTuple):
  """G chunks of every head; keys of each are the L = 2C tokens up to its end."""

  query: Float[Array, "A C H"]
  key: Float[Array, "A L H"]
  column: Float[Array, "A L"]
  value: Float[Array, "A L V"]
  rows: Int[Array, "B N G C"]
  allowed: Bool[Array, "A X Y"]


def groups(heads: int, length: int, chunk_size: int) -> tuple[int, int]:
  """G, the number of chunks that one step takes of each head, and the steps.

  `heads` are those of all examples, B·N.
  """
  num_chunks = -(-length // chunk_size)
  most = max(1, min(_PLACES, _ROWS // heads) // chunk_size)
  steps = -(-num_chunks // most)
  return -(-num_chunks // steps), steps


def take(
  x: Float[Array, "B T K *F"], index: Int[Array, "B N G L"]
) -> Float[Array, "A L *F"]:
  """Rows `index` of each head n, read from head n // (N/K) of x."""
  grouped = index.reshape(x.shape[0], x.shape[2], -1)
  rows = jax.vmap(jax.vmap(_rows, (1, 0)))(x, grouped)
  return rows.reshape(-1, index.shape[-1], *x.shape[3:])


def _rows(x, index):
  return x.at[index].get(mode="promise_in_bounds")


def unsort(
  x: Float[Array, "B N D *F"], place: Int[Array, "B N T"]
) -> Float[Array, "B T N *F"]:
  """Brings an array in sorted order back to the order of positions."""
  return jax.vmap(jax.vmap(_rows, out_axes=1))(x, place)


def _windows(x: Int[Array, "B N places"], size: int) -> Int[Array, "B N G L"]:
  """Places of every chunk but the first, those of the chunk before it first."""
  chunks = x.reshape(*x.shape[:2], -1, size)
  return jnp.concatenate([chunks[:, :, :-1], chunks[:, :, 1:]], axis=3)


def round_of(plan: Plan, r: Array) -> tuple[Array, Array]:
  """The token at each place of round r, and the place of each token."""
  order, place = (
    jax.lax.dynamic_index_in_dim(x, r, keepdims=False)
    for x in (plan.order, plan.place)
  )
  return order, place


def allowed_pairs(
  geometry: Geometry, plan: Plan, r: Array, order: Int[Array, "B N D"]
) -> Bool[Array, "B N chunks C L"]:
  """Which pairs of every chunk round r counts.

  For the whole round at once, a byte a pair. As part of each step it takes ten
  times as long: XLA does it anew for every use, number by number.
  """
  size, width = geometry.chunk_size, geometry.width
  place = jnp.arange(order.shape[-1])
  is_token = (place >= size) & (place < size + plan.code.shape[-1])
  codes = jax.vmap(jax.vmap(jax.vmap(_rows)), (0, None))(plan.code, order)
  # Padding is near nothing: its codes are below 0 and `width` apart.
  padding = jnp.broadcast_to(-width * (1 + place), codes.shape)
  codes = jnp.where(is_token, codes, padding)

  def ahead(code, counts):
    key = _windows(code, size)[..., None, :]
    row = jnp.where(counts, code[:, :, size:], jnp.iinfo(code.dtype).min)
    # A negative difference is a huge number without its sign.
    return (row.reshape(*key.shape[:3], size, 1) - key).astype(jnp.uint32)

  own = jax.lax.dynamic_index_in_dim(codes, r, keepdims=False)
  allowed = ahead(own, True) < width
  is_other = size + jnp.arange(size)[:, None] != jnp.arange(2 * size)[None]
  allowed &= is_other[None, None, None]
  for before in range(codes.shape[0] - 1):
    allowed &= ahead(codes[before], before < r) >= width
  return allowed


def read(
  geometry: Geometry,
  operands: Operands,
  order: Int[Array, "B N D"],
  allowed: Bool[Array, "B N chunks X Y"],
  i: Array,
) -> Chunks:
  """Gathers the chunks of step i."""
  size = geometry.chunk_size
  batch, length, num_heads = operands.column.shape
  group, _ = groups(batch * num_heads, length, size)
  first = i * group
  index = blocks.cut(order, first * size, (group + 1) * size, axis=2)
  index = _windows(index, size)
  allowed = blocks.cut(allowed, first, group, axis=2)
  key = take(operands.vector, index)
  return Chunks(
    query=key[:, size:],
    key=key,
    column=take(operands.column, index),
    value=take(operands.value, index),
    rows=index[..., size:],
    allowed=allowed.reshape(-1, *allowed.shape[3:]),
  )
