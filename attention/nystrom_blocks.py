"""The loops over a sequence behind `nystrom_attention`, forward and backward.

  means          x̃_l = Σ_t [t belongs to l] x_t / count_l
  few_queries    softmax(Q̃ Kᵀ) V, L queries and all keys, by online softmax
  few_keys       softmax(Q K̃ᵀ) U, all queries and L keys

Each visits blocks of C positions and holds one block times L landmarks, nothing
longer, in float32. Logits come without a factor: the landmarks are scaled. Of
a softmax-weighted sum out = p·v with cotangent g,

  dv = pᵀ g      ds = p · (g vᵀ - δ), δ = Σ g·out      dq = ds k     dk = dsᵀ q

where `few_queries` hands out and the log-sum-exp of its L rows on to its
backward and `few_keys`, which sees whole rows, nothing.

The last block moves back to end with the sequence, so nothing is padded. What
is written twice is written alike; what is summed over the sequence counts the
positions that the block before had only once.

Speed. Heads go next to batch inside a block only. Scores are [keys, rows] in
the backward, so that of its five products only one has not the form
'nqd,nkd->nqk' or 'nqk,nkd->nqd', which XLA:CPU sends to its fast kernel. The
scores of L queries over a block of keys, both turned, take 0.6 of the time in
jax 0.10.2 (of the whole 0.89; in jax 0.12 1.05). Means of runs of unequal
length, or under a mask, are a product with a matrix of zeros and ones, of the
few landmarks that a block can touch where no mask makes them unknown. Blocks of
256 positions are a twelfth slower, of 1,024 no faster.
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


def _blocks(length: int) -> tuple[int, int]:
  """The size of a block, and their number."""
  size = min(BLOCK, length)
  return size, -(-length // size)


def _start(i: Array, size: int, length: int) -> tuple[Array, Array]:
  """Where block i starts, and which of its positions no block had before."""
  start = jnp.minimum(i * size, length - size)
  return start, start + jnp.arange(size) >= i * size


def _write_heads(total: Array, block: Array, start: Array) -> Array:
  """Writes `[B, N, C, H]` into `[B, T, N, H]`."""
  return blocks.put(total, jnp.swapaxes(block, 1, 2), start)


def _read(
  x: Float[Array, "B T N H"],
  keep: Bool[Array, "B T"] | None,
  start: Array,
  size: int,
) -> Float[Array, "B N C H"]:
  """A block, heads first; what is masked is zero, so that no NaN gets on."""
  block = blocks.cut(x, start, size)
  if keep is not None:
    block = jnp.where(blocks.cut(keep, start, size)[..., None, None], block, 0)
  return jnp.swapaxes(block, 1, 2).astype(jnp.float32)


def _grouped(x: Float[Array, "B N Q D"], heads: int) -> Float[Array, "B K P D"]:
  """The N/K heads that share a key head become rows of one product."""
  return x.reshape(x.shape[0], heads, -1, x.shape[3])


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
  size, num_blocks = _blocks(length)
  num_landmarks = tokens.counts.shape[1]
  if tokens.keep is None and length % num_landmarks == 0:
    runs = x.reshape(batch, num_landmarks, -1, heads, features)
    return jnp.swapaxes(jnp.mean(runs, axis=2, dtype=jnp.float32), 1, 2)

  def step(i, total):
    start, is_new = _start(i, size, length)
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


def _shares(
  cotangent: Float[Array, "B K L H"], tokens: Tokens
) -> Float[Array, "B L X"]:
  """What each token of a landmark gets of the cotangent of its mean."""
  each = jnp.swapaxes(cotangent, 1, 2)
  each = each.reshape(*each.shape[:2], -1)
  return each / jnp.maximum(tokens.counts, 1)[:, :, None]


def _spread(
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
  size, num_blocks = _blocks(length)
  shares = _shares(cotangent, tokens)

  def step(i, total):
    start, is_new = _start(i, size, length)
    block = blocks.cut(total, start, size)
    more = _spread(shares, tokens, start, size).reshape(block.shape)
    more = jnp.where(is_new[None, :, None, None], more, 0.0)
    return blocks.put(total, block.astype(jnp.float32) + more, start)

  return jax.lax.fori_loop(0, num_blocks, step, total)


def few_queries(
  query: Float[Array, "B N L H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
) -> tuple[Float[Array, "B N L V"], Float[Array, "B K P 1"]]:
  """softmax(Q Kᵀ) V for L queries, and the log-sum-exp of their rows.

  Zeros, and +inf, where every key is hidden.

  Cost: time S·L·N·(H+V), memory B·N·L·C.
  """
  length, heads, width = value.shape[1:]
  size, num_blocks = _blocks(length)
  lowest = jnp.finfo(jnp.float32).min
  rows = _grouped(query, heads)
  columns = blocks.turned(rows)

  def step(i, carry):
    maximum, total, result = carry
    start, is_new = _start(i, size, length)
    keys = _read(key, keep, start, size)
    scores = blocks.dot("bkhq,bkhs->bkqs", columns, blocks.turned(keys))
    if length % size:
      scores = jnp.where(is_new[None, None, None], scores, lowest)
    if keep is not None:
      allowed = blocks.cut(keep, start, size)[:, None, None]
      scores = jnp.where(allowed, scores, lowest)
    higher = jnp.maximum(maximum, jnp.max(scores, -1, keepdims=True))
    shrink = jnp.exp(maximum - higher)
    p = jnp.exp(scores - higher)
    more = blocks.dot("bkqs,bksv->bkqv", p, _read(value, keep, start, size))
    total = total * shrink + jnp.sum(p, -1, keepdims=True)
    return higher, total, result * shrink + more

  # Not below lowest/2: all exponentials of an empty row are 0, not exp(0).
  first = (
    jnp.full((*rows.shape[:3], 1), lowest / 2, jnp.float32),
    jnp.zeros((*rows.shape[:3], 1), jnp.float32),
    jnp.zeros((*rows.shape[:3], width), jnp.float32),
  )
  maximum, total, result = jax.lax.fori_loop(0, num_blocks, step, first)
  empty = total == 0.0
  out = result / jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, jnp.inf, maximum + jnp.log(total))
  return out.reshape(*query.shape[:3], width), lse


def few_queries_backward(
  query: Float[Array, "B N L H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  tokens: Tokens,
  out: Float[Array, "B N L V"],
  lse: Float[Array, "B K P 1"],
  cotangent: Float[Array, "B N L V"],
  of_means: Float[Array, "B K L H"],
) -> tuple[
  Float[Array, "B N L H"], Float[Array, "B S K H"], Float[Array, "B S K V"]
]:
  """Gradients of query, key and value.

  That of the key includes what the means of the keys give it: `of_means` is
  their cotangent.
  """
  length, heads = key.shape[1:3]
  size, num_blocks = _blocks(length)
  rows, g = _grouped(query, heads), _grouped(cotangent, heads)
  delta = blocks.inner(g, _grouped(out, heads))
  delta, lse = jnp.swapaxes(delta, 2, 3), jnp.swapaxes(lse, 2, 3)
  shares = _shares(of_means, tokens)

  def step(i, totals):
    d_rows, d_key, d_value = totals
    start, is_new = _start(i, size, length)
    k = _read(key, tokens.keep, start, size)
    v = _read(value, tokens.keep, start, size)
    p = jnp.exp(blocks.dot("bksh,bkqh->bksq", k, rows) - lse)
    if tokens.keep is not None:
      allowed = blocks.cut(tokens.keep, start, size)[:, None, :, None]
      p = jnp.where(allowed, p, 0.0)
    ds = p * (blocks.dot("bksv,bkqv->bksq", v, g) - delta)
    dk = jnp.swapaxes(blocks.dot("bksq,bkqh->bksh", ds, rows), 1, 2)
    dk = dk + _spread(shares, tokens, start, size).reshape(dk.shape)
    d_key = blocks.put(d_key, dk, start)
    dv = blocks.dot("bksq,bkqv->bksv", p, g)
    d_value = _write_heads(d_value, dv, start)
    ds = jnp.where(is_new[None, None, :, None], ds, 0.0)
    return d_rows + blocks.dot("bksq,bksh->bkqh", ds, k), d_key, d_value

  zeros = (jnp.zeros_like(rows), jnp.zeros_like(key), jnp.zeros_like(value))
  d_rows, d_key, d_value = jax.lax.fori_loop(0, num_blocks, step, zeros)
  return d_rows.reshape(query.shape), d_key, d_value


def few_keys(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K L H"],
  value: Float[Array, "B N L V"],
  exists: Bool[Array, "B L"] | None,
) -> Float[Array, "B T N V"]:
  """softmax(Q Kᵀ) V for the keys that exist; zeros where there is none.

  None is all of them.

  Cost: time T·L·N·(H+V), memory B·N·C·L.
  """
  length = query.shape[1]
  batch, num_heads, _, width = value.shape
  size, num_blocks = _blocks(length)

  def step(i, out):
    start, _ = _start(i, size, length)
    rows = _grouped(_read(query, None, start, size), key.shape[1])
    scores = blocks.dot("bkqh,bklh->bkql", rows, key)
    p = _softmax(scores, exists, 3)
    p = p.reshape(batch, num_heads, size, -1)
    return _write_heads(out, blocks.dot("bnql,bnlv->bnqv", p, value), start)

  out = jnp.zeros((batch, length, num_heads, width), query.dtype)
  return jax.lax.fori_loop(0, num_blocks, step, out)


def _softmax(
  scores: Float[Array, "B N X Y"], exists: Bool[Array, "B L"] | None, axis: int
) -> Float[Array, "B N X Y"]:
  """Softmax over the keys that exist; zeros where there is none."""
  lowest = jnp.finfo(jnp.float32).min
  if exists is not None:
    scores = jnp.where(jnp.expand_dims(exists, (1, 5 - axis)), scores, lowest)
  maximum = jnp.max(scores, axis, keepdims=True)
  p = jnp.exp(scores - jnp.maximum(maximum, lowest / 2))
  total = jnp.sum(p, axis, keepdims=True)
  return p / jnp.where(total == 0.0, 1.0, total)


def few_keys_backward(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K L H"],
  value: Float[Array, "B N L V"],
  exists: Bool[Array, "B L"] | None,
  cotangent: Float[Array, "B T N V"],
) -> tuple[
  Float[Array, "B T N H"], Float[Array, "B K L H"], Float[Array, "B N L V"]
]:
  """Gradients of query, key and value."""
  length, num_heads = query.shape[1:3]
  batch, heads = key.shape[:2]
  size, num_blocks = _blocks(length)
  each = jnp.repeat(key, num_heads // heads, axis=1)

  def step(i, totals):
    d_query, d_each, d_value = totals
    start, is_new = _start(i, size, length)
    rows = _read(query, None, start, size)
    g = _read(cotangent, None, start, size)
    scores = blocks.dot("bnlh,bnqh->bnlq", each, rows)
    p = _softmax(scores, exists, 2)
    dp = blocks.dot("bnlv,bnqv->bnlq", value, g)
    ds = p * (dp - jnp.sum(p * dp, 2, keepdims=True))
    dq = blocks.dot("bnlq,bnlh->bnqh", ds, each)
    d_query = _write_heads(d_query, dq, start)
    is_new = is_new[None, None, None, :]
    p, ds = jnp.where(is_new, p, 0.0), jnp.where(is_new, ds, 0.0)
    d_each = d_each + blocks.dot("bnlq,bnqh->bnlh", ds, rows)
    return d_query, d_each, d_value + blocks.dot("bnlq,bnqv->bnlv", p, g)

  zeros = (jnp.zeros_like(query), jnp.zeros_like(each), jnp.zeros_like(value))
  d_query, d_each, d_value = jax.lax.fori_loop(0, num_blocks, step, zeros)
  d_key = jnp.sum(d_each.reshape(batch, heads, -1, *key.shape[2:]), 2)
  return d_query, d_key, d_value
