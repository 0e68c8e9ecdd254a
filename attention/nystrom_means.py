"""Landmarks of `nystrom_attention`: means over runs of tokens, in blocks.

  means          x̃_l = Σ_t [t belongs to l] x_t / count_l

in float32. Blocks of C positions are visited, of which the last moves back to
end with the sequence, so nothing is padded; what is summed over the sequence
counts the positions that the block before had only once.

Speed. Means of runs of equal length are means of the axis that counts them.
Others, or under a mask, are a product with a matrix of zeros and ones, of the few
landmarks that a block can touch where no mask makes them unknown.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import blocks

BLOCK = 512


class Tokens(NamedTuple):
  """Which tokens exist, and the landmark of each.

  Attributes:
    keep: None where all exist.
    groups: the landmark of every token; L where there is none.
    counts: tokens of every landmark.
  """

  keep: Bool[Array, "B T"] | None
  groups: Int[Array, "B T"]
  counts: Int[Array, "B L"]


def sizes(length: int) -> tuple[int, int]:
  """The size of a block, and their number."""
  size = min(BLOCK, length)
  return size, -(-length // size)


def block_start(i: Array, size: int, length: int) -> tuple[Array, Array]:
  """Where block i starts, and which of its positions no block had before."""
  start = jnp.minimum(i * size, length - size)
  return start, start + jnp.arange(size) >= i * size


def _members(
  tokens: Tokens, start: Array, size: int
) -> tuple[Float[Array, "B W C"], Array | int]:
  """Who belongs to whom in a block, for W landmarks from the second result on.

  Where every token exists, a block cannot touch more than W < L landmarks.
  """
  length, num_landmarks = tokens.groups.shape[1], tokens.counts.shape[1]
  first, width = 0, num_landmarks
  if tokens.keep is None:
    width = min(width, (size - 1) * num_landmarks // length + 2)
    first = start * num_landmarks // length
    first = jnp.minimum(first, num_landmarks - width)
  landmarks = first + jnp.arange(width)[None, :, None]
  groups = blocks.cut(tokens.groups, start, size)[:, None, :]
  return (groups == landmarks).astype(jnp.float32), first


def means(
  x: Float[Array, "B T K H"], tokens: Tokens
) -> Float[Array, "B K L H"]:
  """Means over the tokens of each landmark; zeros for one without.

  Cost: time T·L·K·H with a mask, C·L·K·H without, T·K·H if L divides T too.
  """
  batch, length, heads, features = x.shape
  size, num_blocks = sizes(length)
  num_landmarks = tokens.counts.shape[1]
  if tokens.keep is None and length % num_landmarks == 0:
    runs = x.reshape(batch, num_landmarks, -1, heads, features)
    return jnp.swapaxes(jnp.mean(runs, axis=2, dtype=jnp.float32), 1, 2)

  def step(i, total):
    start, is_new = block_start(i, size, length)
    member, first = _members(tokens, start, size)
    member = jnp.where(is_new[None, None], member, 0.0)
    block = blocks.cut(x, start, size)
    if tokens.keep is not None:
      kept = blocks.cut(tokens.keep, start, size)
      block = jnp.where(kept[..., None, None], block, 0)
    block = block.reshape(batch, size, -1).astype(jnp.float32)
    more = blocks.dot("blc,bcx->blx", member, block)
    return blocks.add(total, more, first)

  total = jnp.zeros((batch, num_landmarks, heads * features), jnp.float32)
  total = jax.lax.fori_loop(0, num_blocks, step, total)
  total = total / jnp.maximum(tokens.counts, 1)[:, :, None]
  total = total.reshape(batch, num_landmarks, heads, features)
  return jnp.swapaxes(total, 1, 2)


def shares_of(
  cotangent: Float[Array, "B K L H"], tokens: Tokens
) -> Float[Array, "B L X"]:
  """What each token of a landmark gets of the cotangent of its mean."""
  each = jnp.swapaxes(cotangent, 1, 2)
  each = each.reshape(*each.shape[:2], -1)
  return each / jnp.maximum(tokens.counts, 1)[:, :, None]


def spread(
  shares: Float[Array, "B L X"], tokens: Tokens, start: Array, size: int
) -> Float[Array, "B C X"]:
  """The shares of the tokens of a block."""
  member, first = _members(tokens, start, size)
  shares = blocks.cut(shares, first, member.shape[1])
  return blocks.dot("bcl,blx->bcx", jnp.swapaxes(member, 1, 2), shares)


def add_means_backward(
  total: Float[Array, "B T N H"],
  cotangent: Float[Array, "B N L H"],
  tokens: Tokens,
) -> Float[Array, "B T N H"]:
  """Adds the gradient of what was averaged to `total`."""
  length = total.shape[1]
  size, num_blocks = sizes(length)
  shares = shares_of(cotangent, tokens)

  def step(i, total):
    start, is_new = block_start(i, size, length)
    block = blocks.cut(total, start, size)
    more = spread(shares, tokens, start, size).reshape(block.shape)
    more = jnp.where(is_new[None, :, None, None], more, 0.0)
    return blocks.put(total, block.astype(jnp.float32) + more, start)

  return jax.lax.fori_loop(0, num_blocks, step, total)
