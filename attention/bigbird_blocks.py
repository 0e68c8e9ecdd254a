"""The block loop behind `bigbird_attention`, with its own backward.

The loop serves the queries between the global blocks, one block of C a step;
which keys a block sees is in `bigbird_keys`. Forward, for one row with logits x
over its allowed keys A:

  m = max_A x,   l = Σ_A exp(x - m),   out = Σ_A exp(x - m) v / l,
  lse = m + log l    (+inf for an empty A, whose out is 0).

Backward, from the inputs, out and lse only, with g the cotangent of out:

  p = exp(x - lse) on A, else 0        dv = (p·Δ)ᵀ g
  δ = Σ g·out                          ds = p · (Δ · (g vᵀ) - δ) · scale
  dq = ds k                            dk = dsᵀ q

Δ is 1, or keep / (1 - rate) with dropout: then out = Σ_A Δ exp(x - m) v / l. Each
block draws it from a key of its own, in the forward and again in the backward.

dv and dk of the global keys are summed in arrays of G rows; those of window and
random blocks are added in place to arrays that the loop carries.

Speed. Keys and values are brought to [B, K, T, H] once, exactly as
`flash_attention` does for the global queries, so that a compiled program does
it once for both; blocks are then gathered twice as fast. The groups of keys are
joined in one array per step: products and sums for each apart cost more than
this copy. Scores are transposed in the backward, [keys, queries], for the sake
of XLA:CPU's fast products, see `blocks`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import blocks
from attention.bigbird_keys import (
  Geometry,
  Limits,
  Operands,
  prepare,
  read,
  scatter_add,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def middle_attention(
  geometry: Geometry, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Attention of the blocks between the globals; zeros in the global rows."""
  return _forward(geometry, operands, limits)[0]


def _middle_fwd(geometry, operands, limits):
  out, lse = _forward(geometry, operands, limits)
  return out, (operands, limits, out, lse)


def _forward(
  geometry: Geometry, operands: Operands, limits: Limits
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """The output and the log-sum-exp of every row between the globals."""
  batch, length, num_heads, _ = operands.query.shape
  size = geometry.block
  keys = prepare(geometry, operands, limits)
  by_mask = limits.key_mask is not None or limits.query_segments is not None

  def step(i, carry):
    out, lse = carry
    block = read(geometry, operands, limits, keys, i)
    scores = blocks.dot("nqd,nkd->nqk", block.query, block.key)
    by_head = (batch, num_heads, size, scores.shape[-1])
    allowed = blocks.of_pairs(block.allowed, by_head, scores)
    p, total, row_lse = blocks.exponentials(
      scores * geometry.scale, allowed, by_mask
    )
    if geometry.dropout_rate:
      p *= blocks.kept(limits.dropout_rng, geometry.dropout_rate, p.shape, i)
    p = p.astype(block.value.dtype)
    result = blocks.dot("nqk,nkd->nqd", p, block.value)
    result /= jnp.where(total > 0.0, total, 1.0)
    row_lse = blocks.heads_last(row_lse, batch, size)[..., 0]
    return (
      blocks.put(out, blocks.heads_last(result, batch, size), block.start),
      blocks.put(lse, row_lse, block.start),
    )

  shape = (batch, length, num_heads)
  out = jnp.zeros((*shape, operands.value.shape[-1]), operands.query.dtype)
  lse = jnp.zeros(shape, jnp.float32)
  return jax.lax.fori_loop(0, limits.random.shape[1], step, (out, lse))


def _middle_bwd(geometry, residuals, cotangent):
  """The backward of the module's docstring, scores transposed: [keys, rows]."""
  operands, limits, out, lse = residuals
  batch, length, num_heads, _ = operands.query.shape
  kv_heads = operands.key.shape[2]
  size = geometry.block
  middle = limits.random.shape[1]
  num_globals = length - middle * size
  num_shared = num_globals + min(3, middle) * size
  keys = prepare(geometry, operands, limits)

  def step(i, carry):
    dq_total, totals, of_globals = carry
    block = read(geometry, operands, limits, keys, i)

    def rows(x):
      return blocks.heads_first(blocks.cut(x, block.start, size), num_heads)

    g = rows(cotangent)
    delta = jnp.swapaxes(blocks.inner(g, rows(out)), 1, 2)
    row_lse = rows(lse[..., None])[:, None, :, 0]

    scores = blocks.dot("nkd,nqd->nkq", block.key, block.query)
    p = jnp.exp(scores * geometry.scale - row_lse)
    allowed = jnp.swapaxes(block.allowed, 2, 3)
    p = p.reshape(batch, num_heads, -1, size)
    p = jnp.where(allowed, p, 0.0).reshape(scores.shape)
    dp = blocks.dot("nkd,nqd->nkq", block.value, g)
    dropped = p
    if geometry.dropout_rate:
      shape = (p.shape[0], size, p.shape[1])
      kept = jnp.swapaxes(
        blocks.kept(limits.dropout_rng, geometry.dropout_rate, shape, i), 1, 2
      )
      dp, dropped = dp * kept, p * kept
    ds = (p * (dp - delta) * geometry.scale).astype(block.query.dtype)
    dv = blocks.dot("nkq,nqd->nkd", dropped.astype(g.dtype), g)
    dk = blocks.dot("nkq,nqd->nkd", ds, block.query)
    dq = blocks.dot("nkq,nkd->nqd", ds, block.key)

    def spread(total, of_globals, x):
      x = x.reshape(batch, num_heads, *x.shape[1:])
      total = scatter_add(total, block.random, size, x[:, :, num_shared:])
      shared = x[:, :, :num_shared]
      shared = shared.reshape(batch, kv_heads, -1, *shared.shape[2:]).sum(2)
      near = shared[:, :, num_globals:]
      near += blocks.cut(total, block.first, near.shape[2], axis=2)
      total = jax.lax.dynamic_update_slice_in_dim(total, near, block.first, 2)
      return total, of_globals + shared[:, :, :num_globals]

    dk_total, dk_globals = spread(totals[0], of_globals[0], dk)
    dv_total, dv_globals = spread(totals[1], of_globals[1], dv)
    dq = blocks.heads_last(dq, batch, size)
    return (
      blocks.put(dq_total, dq, block.start),
      (dk_total, dv_total),
      (dk_globals, dv_globals),
    )

  heads_first = [jnp.swapaxes(x, 1, 2) for x in operands[1:]]
  arrays = operands.query, tuple(heads_first), keys.of_globals[:2]
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
  dq, totals, of_globals = jax.lax.fori_loop(0, middle, step, zeros)
  last = (middle + 1) * size

  def place(total, x):
    """Fills in the global rows, which the loop has left at zero."""
    total = total.at[:, :, :size].set(x[:, :, :size])
    return jnp.swapaxes(total.at[:, :, last:].set(x[:, :, size:]), 1, 2)

  gradients = Operands(dq, *map(place, totals, of_globals))
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, operands), None


middle_attention.defvjp(_middle_fwd, _middle_bwd)
