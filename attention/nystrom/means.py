"""Landmarks of `nystrom_attention`: means over runs of tokens.

  x̃_l = Σ_t [t belongs to l] x_t / count_l

in float32. Where all runs have the same length, they are an axis of the
reshaped array, and the means are taken along it. Otherwise, and with a mask,
the means are products with a matrix of zeros and ones, block by block. Without
a mask, this matrix has only the few landmarks that a block can touch. The last
block moves back to end with the sequence, so that nothing is padded. Positions
that it shares with the block before count in that block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.core import layout, platform


class Tokens(NamedTuple):
  """Which tokens exist, and the landmark of each.

  Attributes:
    keep: which tokens exist; None is all.
    groups: the landmark of every token; L for a token that does not exist.
    counts: the number of tokens of every landmark.
  """

  keep: Bool[Array, "B T"] | None
  groups: Int[Array, "B T"]
  counts: Int[Array, "B L"]


def cut_into_runs(
  keep: Bool[Array, "B T"] | None,
  batch: int,
  length: int,
  num_landmarks: int,
  axis_name: str | None = None,
) -> Tokens:
  """Cuts the tokens that exist into L runs of nearly equal length.

  With `axis_name` the T tokens are this device's part of a sequence, whose runs
  are numbered and counted.
  """
  kept = jnp.ones((batch, length), bool) if keep is None else keep
  rank = jnp.cumsum(kept, axis=1) - 1
  total = jnp.sum(kept, axis=1, keepdims=True)
  if axis_name is not None:
    # The runs of a part begin anywhere, so each token says where it belongs.
    keep = kept
    totals = jax.lax.all_gather(total, axis_name)
    of_device = jnp.arange(len(totals))[:, None, None]
    is_before = of_device < jax.lax.axis_index(axis_name)
    rank += jnp.sum(jnp.where(is_before, totals, 0), axis=0)
    total = jnp.sum(totals, axis=0)
  groups = rank * num_landmarks // jnp.maximum(total, 1)
  # Landmark l begins with the first rank r for which r·L ≥ l·n.
  begins = -(-jnp.arange(num_landmarks + 1)[None] * total // num_landmarks)
  groups = jnp.where(kept, groups, num_landmarks)
  return Tokens(keep, groups, jnp.diff(begins, axis=1))


def means(
  x: Float[Array, "B T K H"], tokens: Tokens, axis_name: str | None = None
) -> Float[Array, "B K L H"]:
  """Means over the tokens of each landmark; zeros for one without tokens.

  With `axis_name` the tokens are this device's, and the means those of all.

  Cost: time T·L·K·H with a mask, C·L·K·H without, for blocks of C positions,
  and T·K·H without if L divides T.
  """
  batch, length, heads, features = x.shape
  num_landmarks = tokens.counts.shape[1]
  if tokens.keep is None and length % num_landmarks == 0:
    runs = x.reshape(batch, num_landmarks, -1, heads, features)
    found = jnp.mean(runs, axis=2, dtype=jnp.float32)
  else:
    found = _means(x, tokens)
  if axis_name is not None:
    found = jax.lax.psum(found, axis_name)
  return jnp.swapaxes(found, 1, 2)


def _members(
  tokens: Tokens, start: Array, size: int
) -> tuple[Float[Array, "B W C"], Array | int]:
  """Which tokens of a block belong to which of W landmarks, and the first of
  them.

  Where every token exists, W is the most landmarks that a block can touch.
  """
  length, num_landmarks = tokens.groups.shape[1], tokens.counts.shape[1]
  first, width = 0, num_landmarks
  if tokens.keep is None:
    width = min(width, (size - 1) * num_landmarks // length + 2)
    first = start * num_landmarks // length
    first = jnp.minimum(first, num_landmarks - width)
  landmarks = first + jnp.arange(width)[None, :, None]
  groups = layout.cut(tokens.groups, start, size)[:, None, :]
  return (groups == landmarks).astype(jnp.float32), first


def _blocks(shape: tuple[int, ...]) -> layout.Blocks:
  """How the positions of an array `[B, T, K, H]` are cut into blocks."""
  batch, length, heads, features = shape
  row_bytes = 4 * batch * heads * features
  return layout.Blocks(length, platform.rows_at_once(row_bytes, length))


@jax.custom_vjp
def _means(
  x: Float[Array, "B T K H"], tokens: Tokens
) -> Float[Array, "B L K H"]:
  """The means, computed block by block."""
  blocks = _blocks(x.shape)

  def step(i, total):
    start = blocks.start(i)
    member, first = _members(tokens, start, blocks.size)
    is_new = blocks.is_new(i)
    if is_new is not None:
      member = jnp.where(is_new[None, None], member, 0.0)
    block = layout.cut(x, start, blocks.size)
    if tokens.keep is not None:
      kept = layout.cut(tokens.keep, start, blocks.size)
      block = jnp.where(kept[..., None, None], block, 0)
    more = layout.dot("blc,bckh->blkh", member, block.astype(jnp.float32))
    return layout.add(total, more, first)

  shape = (x.shape[0], tokens.counts.shape[1], *x.shape[2:])
  total = jnp.zeros(shape, jnp.float32)
  total = jax.lax.fori_loop(0, blocks.number, step, total)
  return total / jnp.maximum(tokens.counts, 1)[:, :, None, None]


def _means_fwd(x, tokens):
  return _means(x, tokens), (jnp.zeros((0,), x.dtype), tokens)


def _means_bwd(residuals, cotangent):
  """Gives each token its share of the gradient of its landmark."""
  of_dtype, tokens = residuals
  shape = (*tokens.groups.shape, *cotangent.shape[2:])
  blocks = _blocks(shape)
  shares = cotangent / jnp.maximum(tokens.counts, 1)[:, :, None, None]

  def step(i, total):
    start = blocks.start(i)
    member, first = _members(tokens, start, blocks.size)
    block = layout.cut(shares, first, member.shape[1])
    # Transposed, so that the product has a fast form.
    block = layout.dot("bcl,blkh->bckh", jnp.swapaxes(member, 1, 2), block)
    return layout.put(total, block, start)

  total = jnp.zeros(shape, of_dtype.dtype)
  return jax.lax.fori_loop(0, blocks.number, step, total), None


_means.defvjp(_means_fwd, _means_bwd)
