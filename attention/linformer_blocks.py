"""The two loops behind `linformer_attention`, each with its own backward.

`project` mixes positions to R rows, P = Eᵀ X, in one pass over blocks of
positions. It is linear: backward dX = E dP and dE = X dPᵀ, block by block.

`attend` is softmax attention to R keys in blocks of queries. For the rows of a
block, with g the cotangent of out,

  p = exp(scale·q Kᵀ − lse),  out = p V,  δ = Σ g·out,  ds = p (g Vᵀ − δ),
  dV = pᵀ g,  dK = dsᵀ q,  dq = ds K

from query, K, V, out and lse alone. Backward, scores are held transposed,
[keys, rows], for the fast products (`blocks`).

The last block moves back to end with the sequence, so that no array is padded;
what it shares with the block before counts once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.blocks import (
  add,
  cut,
  dot,
  heads_first,
  heads_last,
  inner,
  over_keys,
  put,
)

BLOCK = 512
"""C: positions at a time. Blocks of 128 take 1.2 of the time, the products of
smaller matrices being slower by more than the cache gains."""


@jax.custom_vjp
def project(
  projection: Float[Array, "G P R"],
  x: Float[Array, "B S K D"],
  keep: Bool[Array, "B S"] | None,
) -> Float[Array, "A R D"]:
  """Σ_s E[s, r] x_s in float32 over the positions that count; A = B·K.

  G is K, or 1 for a projection common to all heads; P ≥ S.
  """
  batch, length, heads, features = x.shape
  groups, _, rank = projection.shape
  size = min(BLOCK, length)

  def step(i, total):
    rows, block, _ = _cut(projection, x, keep, i)
    rows = jnp.swapaxes(rows, 1, 2)
    return total + dot("grc,gcx->grx", rows, block)

  width = batch * heads * features // groups
  total = jnp.zeros((groups, rank, width), jnp.float32)
  total = jax.lax.fori_loop(0, -(-length // size), step, total)
  total = total.reshape(groups, rank, batch, heads // groups, features)
  return jnp.einsum("grbkd->bgkrd", total).reshape(-1, rank, features)


def _cut(projection, x, keep, i):
  """Block i of E and of x, 0 where x does not count, and where it starts."""
  length, groups = x.shape[1], projection.shape[0]
  size = min(BLOCK, length)
  start = jnp.minimum(i * size, length - size)
  block = cut(x, start, size)
  kept = None if keep is None else cut(keep, start, size)
  if length % size:
    is_new = (start + jnp.arange(size) >= i * size)[None]
    kept = is_new if kept is None else kept & is_new
  if kept is not None:
    block = jnp.where(kept[:, :, None, None], block, 0)
  # [B, C, G, K/G, D] to [G, C, B · K/G · D].
  block = block.reshape(*block.shape[:2], groups, -1, block.shape[-1])
  block = jnp.einsum("bcgkd->gcbkd", block).reshape(groups, size, -1)
  return cut(projection, start, size).astype(x.dtype), block, (start, kept)


def _project_fwd(projection, x, keep):
  return project(projection, x, keep), (projection, x, keep)


def _project_bwd(residuals, g):
  projection, x, keep = residuals
  batch, length, heads, features = x.shape
  groups, _, rank = projection.shape
  size = min(BLOCK, length)
  g = g.reshape(batch, groups, -1, rank, features)
  g = jnp.einsum("bgkrd->grbkd", g).reshape(groups, rank, -1).astype(x.dtype)

  def step(i, carry):
    d_projection, d_x = carry
    rows, block, (start, kept) = _cut(projection, x, keep, i)
    d_rows = dot("gcx,grx->gcr", block, g)
    d_block = dot("gcr,grx->gcx", rows, g)
    d_block = d_block.reshape(groups, size, batch, -1, features)
    d_block = jnp.einsum("gcbkd->bcgkd", d_block).reshape(
      batch, size, heads, features
    )
    if kept is not None:
      d_block = jnp.where(kept[:, :, None, None], d_block, 0)
    place = put if length % size == 0 else add
    return place(d_projection, d_rows, start), place(d_x, d_block, start)

  zeros = jnp.zeros_like(projection), jnp.zeros_like(x)
  d_projection, d_x = jax.lax.fori_loop(0, -(-length // size), step, zeros)
  return d_projection, d_x, None


project.defvjp(_project_fwd, _project_bwd)


@jax.custom_vjp
def attend(
  query: Float[Array, "B T N H"],
  keys: Float[Array, "A R H"],
  values: Float[Array, "A R V"],
  some: Bool[Array, "A 1 1"] | None,
) -> Float[Array, "B T N V"]:
  """softmax(q Kᵀ) V of every query; zeros where `some` is False."""
  return _attend(query, keys, values, some)[0]


def _attend(query, keys, values, some):
  """The result, and lse `[B, T, N, 1]`."""
  batch, length, num_heads, _ = query.shape
  kv_heads = keys.shape[0] // batch
  size = min(BLOCK, length)

  def step(i, carry):
    start = jnp.minimum(i * size, length - size)
    rows = heads_first(cut(query, start, size), kv_heads)
    logits = dot("nqd,nkd->nqk", rows, keys)
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = dot("nqk,nkd->nqd", weights.astype(values.dtype), values) / total
    lse = maximum + jnp.log(total)
    if some is not None:
      out, lse = jnp.where(some, out, 0.0), jnp.where(some, lse, jnp.inf)
    return tuple(
      put(whole, heads_last(x, batch, size), start)
      for whole, x in zip(carry, (out, lse), strict=True)
    )

  out = jnp.zeros((*query.shape[:3], values.shape[-1]), query.dtype)
  lse = jnp.zeros((batch, length, num_heads, 1), jnp.float32)
  return jax.lax.fori_loop(0, -(-length // size), step, (out, lse))


def _attend_fwd(query, keys, values, some):
  out, lse = _attend(query, keys, values, some)
  return out, (query, keys, values, out, lse)


def _attend_bwd(residuals, cotangent):
  query, keys, values, out, lse = residuals
  batch, length = query.shape[:2]
  kv_heads = keys.shape[0] // batch
  size = min(BLOCK, length)

  def step(i, carry):
    d_query, d_keys, d_values = carry
    start = jnp.minimum(i * size, length - size)
    row_lse = cut(lse, start, size)
    if length % size:
      # Rows that the block before has had get weights 0.
      is_new = start + jnp.arange(size) >= i * size
      row_lse = jnp.where(is_new[None, :, None, None], row_lse, jnp.inf)
    rows, g, row_out, row_lse = (
      heads_first(x, kv_heads)
      for x in (
        cut(query, start, size),
        cut(cotangent, start, size),
        cut(out, start, size),
        row_lse,
      )
    )
    delta = inner(g, row_out)
    row_lse, delta = (jnp.swapaxes(x, 1, 2) for x in (row_lse, delta))
    weights = jnp.exp(dot("nkd,nqd->nkq", keys, rows) - row_lse)
    d_logits = weights * (dot("nkd,nqd->nkq", values, g) - delta)
    weights, d_logits = weights.astype(g.dtype), d_logits.astype(rows.dtype)
    d_rows = jnp.swapaxes(over_keys(keys, d_logits), 1, 2)
    d_rows = heads_last(d_rows, batch, size)
    place = put if length % size == 0 else add
    return (
      place(d_query, d_rows, start),
      d_keys + dot("nkq,nqd->nkd", d_logits, rows),
      d_values + dot("nkq,nqd->nkd", weights, g),
    )

  totals = (
    jnp.zeros_like(query),
    jnp.zeros(keys.shape, jnp.float32),
    jnp.zeros(values.shape, jnp.float32),
  )
  d_query, d_keys, d_values = jax.lax.fori_loop(
    0, -(-length // size), step, totals
  )
  return (
    d_query,
    d_keys.astype(keys.dtype),
    d_values.astype(values.dtype),
    None,
  )


attend.defvjp(_attend_fwd, _attend_bwd)
