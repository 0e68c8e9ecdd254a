"""Dense attention a block of queries at a time: each row whole, few at once.

A row of the softmax needs no other, so blocks of C queries with all S keys give
the same numbers and hold B·N·C·S of the B·N·T·S scores. `jax.checkpoint` makes
them again in the backward. All is left to autodiff, of any order and direction.

Speed. A block stays in cache from its product to the next one; the whole matrix
goes through memory at every step of the softmax. At length 4,096 blocks of 256
take half the time of the whole, 128 and 512 up to a fifth more than 256. Up to
512 queries the whole is faster, for nothing is made again. Keys and values are
brought to [heads, keys, features] once, before the loop: products of that form
are the fast ones on CPU, and beside T·S numbers the copies are nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ROWS = 256
"""C."""

WHOLE = 512
"""The longest T that is one block."""


class Rows(NamedTuple):
  """Some queries and what goes along with them.

  Attributes:
    query: `[B, C, N, H]`.
    mask: what broadcasts to `[B, N, C, S]`, True = attend.
    bias: likewise, a number.
    segments: `[B, C]`.
  """

  query: Float[Array, "B C N H"]
  mask: Bool[Array, "..."] | None
  bias: Float[Array, "..."] | None
  segments: Int[Array, "B C"] | None


_AXES = {"query": 1, "mask": 2, "bias": 2, "segments": 1}
"""Along which the rows of each stand."""


def by_blocks(
  attend: Callable[[Rows, Array | int], Float[Array, "B C N V"]], rows: Rows
) -> Float[Array, "B T N V"]:
  """`attend(block, i)` of all blocks, block i from position i·C on."""
  batch, length, num_heads, _ = rows.query.shape
  if length <= WHOLE:
    return attend(rows, 0)
  attend = jax.checkpoint(attend, prevent_cse=False)
  count = length // ROWS
  whole = count * ROWS
  varying = {
    name: x
    for name, x in rows._asdict().items()
    if x is not None and x.shape[_AXES[name]] > 1
  }

  def cut(start, end):
    return {
      name: jax.lax.slice_in_dim(x, start, end, axis=_AXES[name])
      for name, x in varying.items()
    }

  def stacked(name, x):
    axis = _AXES[name]
    shape = (*x.shape[:axis], count, ROWS, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  def block(i, parts):
    return attend(rows._replace(**parts), i)

  stacks = {name: stacked(name, x) for name, x in cut(0, whole).items()}
  out = jax.lax.map(lambda args: block(*args), (jnp.arange(count), stacks))
  out = jnp.moveaxis(out, 0, 1).reshape(batch, whole, num_heads, -1)
  if whole == length:
    return out
  return jnp.concatenate([out, block(count, cut(whole, length))], axis=1)
