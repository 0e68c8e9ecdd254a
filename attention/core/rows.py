"""A function of whole rows of scores, some queries at a time.

A row of the softmax needs no other, so C queries with all S keys give the same
numbers and hold B·N·C·S of the B·N·T·S scores. `jax.checkpoint` makes them
again in the backward. Everything is left to autodiff, of any order and
direction, which is why this is no `loop.Source`.

On a CPU a block of rows stays in cache from one product to the next. The whole
matrix would go through memory at every step of the softmax.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.core import platform

Attend = Callable[
  [Float[Array, "B C N H"], Array | None, Array | int], Float[Array, "B C N V"]
]
"""`(query, bias, start) -> out` of C rows, of which the first is at `start`."""


WHOLE = 512
"""The longest T that is one block unless the caller asks for less."""


def by_rows(
  attend: Attend,
  query: Float[Array, "B T N H"],
  bias: Float[Array, "#B #N #T #S"] | None,
  source_length: int,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """`attend` of all rows, in blocks.

  Args:
    attend: what is computed for C rows.
    query: `[B, T, N, H]`.
    bias: cut along its rows, if it has all of them.
    source_length: S.
    block_size: C; None is what the platform's budget allows.
  """
  batch, length, num_heads, _ = query.shape
  rows = block_size
  if rows is None:
    row_bytes = 4 * batch * num_heads * source_length
    rows = platform.rows_at_once(row_bytes, length, least=256)
    # A short sequence is one block, of which nothing is made again.
    rows = length if length <= WHOLE else rows
  if length <= rows:
    return attend(query, bias, 0)
  attend = jax.checkpoint(attend, prevent_cse=False)
  count = length // rows
  whole = count * rows
  # A bias has a gradient: cut inside the loop it would be as large as itself.
  varies = bias is not None and bias.shape[2] > 1

  def parts(x, axis):
    x = jax.lax.slice_in_dim(x, 0, whole, axis=axis)
    shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def block(part):
    i, query, of_bias = part
    return attend(query, of_bias if varies else bias, i * rows)

  stacked = parts(bias, 2) if varies else None
  out = jax.lax.map(block, (jnp.arange(count), parts(query, 1), stacked))
  out = jnp.moveaxis(out, 0, 1).reshape(batch, whole, num_heads, -1)
  if whole == length:
    return out
  rest = bias[:, :, whole:] if varies else bias
  last = attend(query[:, whole:], rest, whole)
  return jnp.concatenate([out, last], axis=1)
