"""The block loop behind `sliding_window_attention`, with its own backward.

Geometry. A loop visits blocks of C queries. Block i holds the queries
[a, a+C), a = min(i·C, T-C): the last block moves back to end at T, so no array
is padded. Together they see at most W = min(S, C + left + right) keys, the
slice [f, f+W) with f = clip(a - left, 0, S-W). Inside the slice key s is seen
by query t iff -left ≤ s - t ≤ right, read off the positions, so a clipped slice
needs no case of its own. G global keys are appended to the slice: one softmax
runs over the union.

Forward, for one row x of logits over the W+G keys, A the allowed ones:

  m = max_A x,   l = Σ_A exp(x - m),   out = Σ_A exp(x - m) v / l,
  lse = m + log l    (+inf for an empty A, whose out is 0).

Backward, from the inputs, out and lse only, with g the cotangent of out:

  p = exp(x - lse) on A, else 0        dv = (p·Δ)ᵀ g
  δ = Σ g·out                          ds = p · (Δ · (g vᵀ) - δ) · scale
  dq = ds k                            dk = dsᵀ q

Δ is 1, or keep / (1 - rate) with dropout: then out = Σ_A Δ exp(x - m) v / l. Each
block draws it from a key of its own, in the forward and again in the backward.

dq, dk and dv are added into arrays carried by the loop. Rows that the last
block shares with the one before are the last's, forward and backward (their
Δ differ): in the one before they have g = 0 and so add nothing twice.

Axes. D residue classes of the positions modulo the dilation are part of the
heads, see `sliding_window_dilation`. The J = N/K query heads of a key head
become rows of one product, so keys are never repeated. Only inside a block,
where it is small enough for the cache, is an array brought to [heads, rows,
features].

Speed. All products but one have one of the two forms that XLA:CPU sends to its
fast kernel, 'nqd,nkd->nqk' and 'nqk,nkd->nqd'; for that the backward holds its
scores transposed, [keys, queries]. The one is dq, at half that rate: to
transpose the keys or ds for it costs as much as it gains. Blocks of 128 queries
take 0.7 of the time of blocks of 64 from windows of 256 keys on (128 is better
than 96, 112, 120, 160); narrower ones would waste their keys. Arrays must enter
the loop as [B, T, N, H]: an axis of size 1 makes XLA copy them whole.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import blocks
from attention import relative as relative_terms
from attention.relative import Relative

BLOCK, WIDE_BLOCK = 64, 128
"""Queries of a block, and of one whose window has `_WIDE` keys or more."""
_WIDE = 256


class Geometry(NamedTuple):
  """What is known while tracing.

  Attributes:
    left: a query sees so many keys before its own position.
    right: and so many after it.
    scale: factor of the logits.
    dropout_rate: share of weights set to zero.
  """

  left: int
  right: int
  scale: float
  dropout_rate: float


class Operands(NamedTuple):
  """The arrays that have a derivative; G may be 0, and is with `relative`."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  global_key: Float[Array, "B G K H"]
  global_value: Float[Array, "B G K V"]
  relative: Relative = Relative()


class Limits(NamedTuple):
  """Who may see whom beside the window, and what draws the dropout.

  D divides K, heads go D-major.

  Attributes:
    key_mask: False hides a key of the window from every query.
    query_segments: a query sees keys of the window with its own segment only.
    key_segments: goes with `query_segments`.
    global_mask: which global keys a query sees, all conditions included.
    dropout_rng: a key; not read where the rate is 0.
  """

  key_mask: Bool[Array, "B S D"] | None
  query_segments: Int[Array, "B T D"] | None
  key_segments: Int[Array, "B S D"] | None
  global_mask: Bool[Array, "B T D G"]
  dropout_rng: Array | None


class _Block(NamedTuple):
  """One block as the products want it.

  A = B·K products of Q = J·C rows and X = W+G keys; `allowed` has E = B·D or 1.
  """

  start: Int[Array, ""]
  first: Int[Array, ""]
  query: Float[Array, "A Q H"]
  key: Float[Array, "A X H"]
  value: Float[Array, "A X V"]
  allowed: Bool[Array, "E 1 C X"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def windowed_attention(
  geometry: Geometry, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Softmax attention over the window and the global keys, block by block."""
  return _forward(geometry, operands, limits)[0]


def _windowed_fwd(geometry, operands, limits):
  out, lse = _forward(geometry, operands, limits)
  return out, (operands, limits, out, lse)


def _sizes(geometry: Geometry, operands: Operands) -> tuple[int, int, int]:
  """C, W and the number of blocks."""
  length, source_length = operands.query.shape[1], operands.key.shape[1]
  is_wide = geometry.left + geometry.right >= _WIDE
  rows = min(WIDE_BLOCK if is_wide else BLOCK, length)
  width = min(source_length, rows + geometry.left + geometry.right)
  return rows, width, -(-length // rows)


def _allowed(
  geometry: Geometry,
  limits: Limits,
  start: Array,
  first: Array,
  rows: int,
  width: int,
) -> Bool[Array, "E 1 C X"]:
  """Which key of the block each of its queries sees."""
  offset = (first + jnp.arange(width))[None, :] - (start + jnp.arange(rows))[
    :, None
  ]
  allowed = (offset >= -geometry.left) & (offset <= geometry.right)
  allowed = allowed[None, None]

  def of_rows(x):
    return jnp.moveaxis(blocks.cut(x, start, rows), 1, 2)

  def of_keys(x):
    return jnp.moveaxis(blocks.cut(x, first, width), 1, 2)[:, :, None]

  if limits.key_mask is not None:
    allowed &= of_keys(limits.key_mask)
  if limits.query_segments is not None and limits.key_segments is not None:
    allowed &= of_rows(limits.query_segments)[..., None] == of_keys(
      limits.key_segments
    )
  if limits.global_mask.shape[-1]:
    global_mask = of_rows(limits.global_mask)
    allowed = jnp.broadcast_to(allowed, (*global_mask.shape[:3], width))
    allowed = jnp.concatenate([allowed, global_mask], axis=-1)
  return allowed.reshape(-1, 1, *allowed.shape[2:])


def _read(
  geometry: Geometry, operands: Operands, limits: Limits, i: Array
) -> _Block:
  """Cuts block i out of the whole arrays."""
  rows, width, _ = _sizes(geometry, operands)
  length = operands.query.shape[1]
  source_length, kv_heads = operands.key.shape[1:3]
  start = jnp.minimum(i * rows, length - rows)
  first = jnp.clip(start - geometry.left, 0, source_length - width)

  def keys(x, of_global):
    x = blocks.cut(x, first, width)
    if limits.key_mask is not None:
      # A hidden key is zeroed as well, so that not even NaN gets through.
      mask = blocks.cut(limits.key_mask, first, width)
      mask = jnp.repeat(mask, kv_heads // mask.shape[-1], axis=-1)
      x = jnp.where(mask[..., None], x, 0)
    return blocks.heads_first(jnp.concatenate([x, of_global], axis=1), kv_heads)

  return _Block(
    start=start,
    first=first,
    query=blocks.heads_first(blocks.cut(operands.query, start, rows), kv_heads),
    key=keys(operands.key, operands.global_key),
    value=keys(operands.value, operands.global_value),
    allowed=_allowed(geometry, limits, start, first, rows, width),
  )


def _near(
  geometry: Geometry, operands: Operands, block: _Block, *, by_key: bool
) -> Float[Array, "A X Y"]:
  """What the tables add to the logits of a block, by key: transposed."""
  rows, width, _ = _sizes(geometry, operands)
  return relative_terms.logits(
    operands.relative,
    block.query,
    block.first - block.start,
    rows,
    width,
    geometry.scale,
    by_key,
  )


def _of_products(block: _Block, scores: Array) -> Bool[Array, "A Q X"]:
  """Whom every row of the products sees."""
  num_sets, _, rows, width = block.allowed.shape
  heads = scores.size // (num_sets * rows * width)
  by_head = (num_sets, heads, rows, width)
  return blocks.of_pairs(block.allowed, by_head, scores)


def _forward(
  geometry: Geometry, operands: Operands, limits: Limits
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """The output and the log-sum-exp of every row."""
  rows, _, num_blocks = _sizes(geometry, operands)
  batch, length, num_heads, _ = operands.query.shape
  features = operands.value.shape[-1]
  by_mask = limits.key_mask is not None or limits.query_segments is not None

  def step(i, carry):
    out, lse = carry
    block = _read(geometry, operands, limits, i)
    scores = blocks.dot("nqd,nkd->nqk", block.query, block.key)
    scores *= geometry.scale
    if operands.relative.given:
      scores += _near(geometry, operands, block, by_key=False)
    allowed = _of_products(block, scores)
    p, total, row_lse = blocks.exponentials(scores, allowed, by_mask)
    if geometry.dropout_rate:
      p *= blocks.kept(limits.dropout_rng, geometry.dropout_rate, p.shape, i)
    p = p.astype(block.value.dtype)
    result = blocks.dot("nqk,nkd->nqd", p, block.value)
    result /= jnp.where(total > 0.0, total, 1.0)
    return (
      blocks.put(out, blocks.heads_last(result, batch, rows), block.start),
      blocks.put(
        lse, blocks.heads_last(row_lse, batch, rows)[..., 0], block.start
      ),
    )

  out = jnp.zeros((batch, length, num_heads, features), operands.query.dtype)
  lse = jnp.zeros((batch, length, num_heads), jnp.float32)
  return jax.lax.fori_loop(0, num_blocks, step, (out, lse))


def _windowed_bwd(geometry, residuals, cotangent):
  """The backward of the module's docstring, scores transposed: [keys, rows]."""
  operands, limits, out, lse = residuals
  rows, width, num_blocks = _sizes(geometry, operands)
  batch, length = operands.query.shape[:2]
  kv_heads = operands.key.shape[2]

  def step(i, totals):
    block = _read(geometry, operands, limits, i)
    positions = block.start + jnp.arange(rows)
    is_last_word = (positions < length - rows) | (i == num_blocks - 1)
    g = blocks.cut(cotangent, block.start, rows)
    g = jnp.where(is_last_word[None, :, None, None], g, 0)
    delta = blocks.inner(g, blocks.cut(out, block.start, rows))
    delta = jnp.swapaxes(blocks.heads_first(delta, kv_heads), 1, 2)
    row_lse = blocks.cut(lse, block.start, rows)[..., None]
    row_lse = jnp.swapaxes(blocks.heads_first(row_lse, kv_heads), 1, 2)
    g = blocks.heads_first(g, kv_heads)

    scores = blocks.dot("nkd,nqd->nkq", block.key, block.query)
    scores *= geometry.scale
    if operands.relative.given:
      scores += _near(geometry, operands, block, by_key=True)
    allowed = jnp.moveaxis(block.allowed, 3, 1)  # [B*D, W+G, 1, C]
    p = jnp.exp(scores - row_lse)
    split = (allowed.shape[0], -1, allowed.shape[1], p.shape[2] // rows, rows)
    p = jnp.where(allowed[:, None], p.reshape(split), 0.0).reshape(p.shape)
    dp = blocks.dot("nkd,nqd->nkq", block.value, g)
    dropped = p
    if geometry.dropout_rate:
      shape = (p.shape[0], p.shape[2], p.shape[1])
      kept = jnp.swapaxes(
        blocks.kept(limits.dropout_rng, geometry.dropout_rate, shape, i), 1, 2
      )
      dp, dropped = dp * kept, p * kept
    dlogits = p * (dp - delta)
    ds = (dlogits * geometry.scale).astype(block.query.dtype)
    dv = blocks.dot("nkq,nqd->nkd", dropped.astype(g.dtype), g)
    dk = blocks.dot("nkq,nqd->nkd", ds, block.query)
    dq = blocks.dot("nkq,nkd->nqd", ds, block.key)

    drelative = totals.relative
    if operands.relative.given:
      more, dquery = relative_terms.gradients(
        operands.relative,
        block.query,
        dlogits,
        block.first - block.start,
        rows,
        geometry.scale,
      )
      drelative = jax.tree.map(jnp.add, drelative, more)
      if dquery is not None:
        dq += dquery
    dq = blocks.heads_last(dq, batch, rows)
    dk = blocks.heads_last(dk, batch, dk.shape[1])
    dv = blocks.heads_last(dv, batch, dv.shape[1])

    return Operands(
      query=blocks.add(totals.query, dq, block.start),
      key=blocks.add(totals.key, dk[:, :width], block.first),
      value=blocks.add(totals.value, dv[:, :width], block.first),
      global_key=totals.global_key + dk[:, width:],
      global_value=totals.global_value + dv[:, width:],
      relative=drelative,
    )

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
  totals = jax.lax.fori_loop(0, num_blocks, step, zeros)
  return jax.tree.map(lambda d, x: d.astype(x.dtype), totals, operands), None


windowed_attention.defvjp(_windowed_fwd, _windowed_bwd)
