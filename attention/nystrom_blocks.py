"""The loops over a sequence behind `nystrom_attention`, forward and backward.

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
jax 0.10.2 (of the whole 0.89; in jax 0.12 1.05). The softmax over landmarks
selects nothing, it adds what hides, so that XLA makes it and both its products
one operation (of the whole 0.9). Blocks of 256 positions are a twelfth slower,
of 1,024 no faster.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import blocks
from attention.nystrom_means import (
  Tokens,
  block_start,
  shares_of,
  sizes,
  spread,
)


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
  size, num_blocks = sizes(length)
  lowest = jnp.finfo(jnp.float32).min
  rows = _grouped(query, heads)
  columns = blocks.turned(rows)

  def step(i, carry):
    maximum, total, result = carry
    start, is_new = block_start(i, size, length)
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
  size, num_blocks = sizes(length)
  rows, g = _grouped(query, heads), _grouped(cotangent, heads)
  delta = blocks.inner(g, _grouped(out, heads))
  delta, lse = jnp.swapaxes(delta, 2, 3), jnp.swapaxes(lse, 2, 3)
  shares = shares_of(of_means, tokens)

  def step(i, totals):
    d_rows, d_key, d_value = totals
    start, is_new = block_start(i, size, length)
    k = _read(key, tokens.keep, start, size)
    v = _read(value, tokens.keep, start, size)
    p = jnp.exp(blocks.dot("bksh,bkqh->bksq", k, rows) - lse)
    if tokens.keep is not None:
      allowed = blocks.cut(tokens.keep, start, size)[:, None, :, None]
      p = jnp.where(allowed, p, 0.0)
    ds = p * (blocks.dot("bksv,bkqv->bksq", v, g) - delta)
    dk = jnp.swapaxes(blocks.dot("bksq,bkqh->bksh", ds, rows), 1, 2)
    dk = dk + spread(shares, tokens, start, size).reshape(dk.shape)
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
  size, num_blocks = sizes(length)

  def step(i, out):
    start, _ = block_start(i, size, length)
    rows = _grouped(_read(query, None, start, size), key.shape[1])
    scores = blocks.dot("bkqh,bklh->bkql", rows, key)
    p, total = (
      x.reshape(batch, num_heads, size, -1)
      for x in _exponentials(scores, exists, 3)
    )
    found = blocks.dot("bnql,bnlv->bnqv", p, value) / total
    return _write_heads(out, found, start)

  out = jnp.zeros((batch, length, num_heads, width), query.dtype)
  return jax.lax.fori_loop(0, num_blocks, step, out)


def _exponentials(
  scores: Float[Array, "B N X Y"], exists: Bool[Array, "B L"] | None, axis: int
) -> tuple[Float[Array, "B N X Y"], Float[Array, "..."]]:
  """Numerators and sums of a softmax over the keys that exist.

  Where none does the sum is ∞, so that all weights are 0.
  """
  if exists is not None:
    hidden = jnp.where(exists, 0.0, jnp.finfo(jnp.float32).min / 2)
    scores += jnp.expand_dims(hidden, (1, 5 - axis))
  p = jnp.exp(scores - jnp.max(scores, axis, keepdims=True))
  total = jnp.sum(p, axis, keepdims=True)
  if exists is not None:
    some = jnp.any(exists, axis=1)[:, None, None, None]
    total += jnp.where(some, 0.0, jnp.inf)
  return p, total


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
  size, num_blocks = sizes(length)
  each = jnp.repeat(key, num_heads // heads, axis=1)

  def step(i, totals):
    d_query, d_each, d_value = totals
    start, is_new = block_start(i, size, length)
    rows = _read(query, None, start, size)
    g = _read(cotangent, None, start, size)
    scores = blocks.dot("bnlh,bnqh->bnlq", each, rows)
    p, total = _exponentials(scores, exists, 2)
    p /= total
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
