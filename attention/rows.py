"""A function of whole rows of scores, some queries at a time.

A row of the softmax needs no other, so C queries with all S keys give the same
numbers and hold B·N·C·S of the B·N·T·S scores. `jax.checkpoint` makes them
again in the backward. Everything is left to autodiff, of any order and
direction, which is why this is no `loop.Source`.

On a CPU a block of rows stays in cache from one product to the next. The whole
matrix would go through memory at every step of the softmax.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import platform

Attend = Callable[
  [Float[Array, "B C N H"], Array | None, Array | int, int],
  Float[Array, "B C N V"],
]
"""`(query, bias, start, seen) -> out` of C rows, of which the first is at `start`,
over the first `seen` keys."""


WHOLE = 512
"""The longest T that is one block unless the caller asks for less."""

CAUSAL_PARTS = 2
"""Parts of a causal sequence. The rows of a part skip the keys after it, so 3/4
of the scores are computed; each part is one more loop to compile."""


def by_rows(
  attend: Attend,
  query: Float[Array, "B T N H"],
  bias: Float[Array, "#B #N #T #S"] | None,
  source_length: int,
  block_size: int | None = None,
  is_causal: bool = False,
) -> Float[Array, "B T N V"]:
  """`attend` of all rows, in blocks.

  Args:
    attend: what is computed for C rows.
    query: `[B, T, N, H]`.
    bias: cut along its rows and keys, if it has all of them.
    source_length: S.
    block_size: C; None is what the platform's budget allows.
    is_causal: no row sees a later key.
  """
  batch, length, num_heads, _ = query.shape
  rows = block_size
  if rows is None:
    row_bytes = 4 * batch * num_heads * source_length
    rows = platform.rows_at_once(row_bytes, length, least=256)
    # A short sequence is one block, of which nothing is made again.
    rows = length if length <= WHOLE else rows
  if length <= rows:
    return attend(query, bias, 0, source_length)
  blocks = length // rows
  parts = min(blocks, CAUSAL_PARTS) if is_causal else 1
  ends = [rows * (blocks * i // parts) for i in range(1, parts + 1)]
  ends += [length] * (ends[-1] < length)
  outs = []
  for start, end in zip([0, *ends], ends, strict=False):
    seen = min(end, source_length) if is_causal else source_length
    of_bias = _cut(bias, start, end, seen)
    outs.append(_part(attend, query[:, start:end], of_bias, start, seen, rows))
  return jnp.concatenate(outs, axis=1)


def _cut(bias: Array | None, start: int, end: int, seen: int) -> Array | None:
  """The rows and keys of a bias that has more than one of them."""
  if bias is None:
    return None
  bias = bias[:, :, start:end] if bias.shape[2] > 1 else bias
  return bias[..., :seen]


def _part(
  attend: Attend,
  query: Float[Array, "B T N H"],
  bias: Float[Array, "#B #N #T #S"] | None,
  start: int,
  seen: int,
  rows: int,
) -> Float[Array, "B T N V"]:
  """Rows from `start` on: one block, or a whole number of them in a loop."""

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def made_again(query, bias, start):
    return attend(query, bias, start, seen)

  length = query.shape[1]
  if length <= rows:
    return made_again(query, bias, start)
  count = length // rows
  # A bias has a gradient: cut inside the loop it would be as large as itself.
  varies = bias is not None and bias.shape[2] > 1

  def parts(x, axis):
    shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def block(part):
    i, query, of_bias = part
    return made_again(query, of_bias if varies else bias, start + i * rows)

  stacked = parts(bias, 2) if varies else None
  out = jax.lax.map(block, (jnp.arange(count), parts(query, 1), stacked))
  out = jnp.moveaxis(out, 0, 1)
  return out.reshape(out.shape[0], length, *out.shape[3:])
