"""The block loop behind `additive_attention`, with its own backward.

Forward. With a = W q (one a query) and c = U k (one a key) already projected to
A numbers a head, a loop over blocks of C queries holds one loop over blocks of
D keys, the only place where C·D·A numbers exist:

  z = tanh(a_t + c_s)      x = v·z + bias      M the allowed pairs
  m = max_M x,   l = Σ_M exp(x - m),   out = Σ_M exp(x - m) value / l

m, l and the sum are carried from one block of keys to the next (online
softmax), and lse = m + log l is kept: +inf for a row without keys, whose out is
0. The blocks at the end of a sequence move back to end with it, so nothing is
padded; a pair that two blocks of keys share counts in the first only, and of
rows that two blocks of queries share the later has the last word.

Backward, from the inputs, out and lse, with g the cotangent of out and Δ the
dropout's keep / (1 - rate), 1 without dropout, block by block again:

  p = exp(x - lse) on M, else 0         dvalue = (p·Δ)ᵀ g
  δ = Σ g·out                           dx = p · (Δ · (g valueᵀ) - δ)  = dbias
  dz = dx · v · (1 - z²)                da_t = Σ_s dz,   dc_s = Σ_t dz
  dv = Σ_ts dx · z

Forward, Δ stands beside exp(x - m) in out alone, not in l. It is drawn again,
from a key a block. Rows shared by two blocks of queries have g = 0 in the first:
it is the second whose draws out has.

Speed. The hyperbolic tangent is all of the time. A block of 16 queries and 64
keys stays in the cache; one of 64 by 64 takes a third longer. The sum over A is
a matrix product: as a reduction it takes twice as long.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import additive_pairs
from attention.additive_pairs import Blocks, Limits, Settings

QUERIES, KEYS = 16, 64


class Operands(NamedTuple):
  """The arrays that have a derivative.

  Attributes:
    query: W q, one row a query and head.
    key: U k, likewise.
    value: as given, one a key/value head.
    score: v, one a head.
    bias: added to the scores, each axis full or 1; or None.
  """

  query: Float[Array, "B T N A"]
  key: Float[Array, "B S N A"]
  value: Float[Array, "B S K V"]
  score: Float[Array, "N A"]
  bias: Float[Array, "..."] | None


def _cut(operands: Operands) -> Blocks:
  length, source_length = operands.query.shape[1], operands.key.shape[1]
  rows, columns = min(QUERIES, length), min(KEYS, source_length)
  return Blocks(rows, columns, -(-length // rows), -(-source_length // columns))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  settings: Settings, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Additive attention of projected queries and keys, in float32.

  Args:
    settings: direction and dropout.
    operands: what is differentiated.
    limits: what is not.

  Returns:
    `[B, T, N, V]`; zeros for a query that sees nothing.

  Cost: time T·S·N·(A+V), memory B·N·C·D·A beside the arrays.
  """
  return _forward(settings, operands, limits)[0]


def _attend_fwd(settings, operands, limits):
  out, lse = _forward(settings, operands, limits)
  return out, (operands, limits, out, lse)


def _rows(x: Array, start: Array | int, size: int) -> Array:
  """`[B, C, N, D]` of `[B, T, N, D]`, heads moved next to batch."""
  return jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, start, size, 1), 1, 2)


def _put(total: Array, block: Array, start: Array | int) -> Array:
  """Writes a block of `_rows` back."""
  block = jnp.moveaxis(block, 1, 2).astype(total.dtype)
  return jax.lax.dynamic_update_slice_in_dim(total, block, start, 1)


def _add(total: Array, block: Array, start: Array | int) -> Array:
  return _put(total, block + _rows(total, start, block.shape[2]), start)


def _scores(
  operands: Operands,
  query: Float[Array, "B N C A"],
  row: Array | int,
  column: Array | int,
  blocks: Blocks,
) -> tuple[Float[Array, "B N C D A"], Float[Array, "B N C D"]]:
  """tanh(a + c) of a block, and its scores."""
  key = _rows(operands.key, column, blocks.columns)
  z = jnp.tanh(query[:, :, :, None] + key[:, :, None])
  flat = z.reshape(*z.shape[:2], -1, z.shape[-1])
  # With v repeated for every example: a product without this batch axis is
  # six times slower.
  score = jnp.broadcast_to(operands.score, (z.shape[0], *operands.score.shape))
  x = jnp.einsum("bnxa,bna->bnx", flat, score).reshape(z.shape[:-1])
  if operands.bias is not None:
    x = x + additive_pairs.part(operands.bias, row, column, blocks).astype(
      x.dtype
    )
  return z, x


def _grouped(x: Float[Array, "B N C D"], num_kv_heads: int) -> Array:
  """`[B, K, N/K·C, D]`: the heads that share a value head are its rows."""
  return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[3])


def _last_column(
  is_causal: bool, blocks: Blocks, row: Array | int
) -> Array | int:
  """The number of blocks of keys that the rows from `row` on look at."""
  if not is_causal:
    return blocks.num_columns
  seen = (row + blocks.rows + blocks.columns - 1) // blocks.columns
  return jnp.minimum(seen, blocks.num_columns)


def _forward(
  settings: Settings, operands: Operands, limits: Limits
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """The output and the log-sum-exp of every row."""
  blocks = _cut(operands)
  batch, length, num_heads, _ = operands.query.shape
  source_length, num_kv_heads, width = operands.value.shape[1:]
  lowest = jnp.finfo(jnp.float32).min
  per_row = (batch, num_heads, blocks.rows)

  def of_rows(i, totals):
    row = jnp.minimum(i * blocks.rows, length - blocks.rows)
    query = _rows(operands.query, row, blocks.rows)

    def of_keys(j, carry):
      maximum, total, result = carry
      column = jnp.minimum(j * blocks.columns, source_length - blocks.columns)
      _, x = _scores(operands, query, row, column, blocks)
      allowed = additive_pairs.allowed(
        settings.is_causal, limits, blocks, row, column, j * blocks.columns
      )
      x = jnp.where(allowed, x, lowest)
      # Not below lowest/2, where it starts: all exponentials of an empty row
      # are 0, not exp(0).
      higher = jnp.maximum(maximum, jnp.max(x, -1, keepdims=True))
      shrink = jnp.exp(maximum - higher)
      p = jnp.exp(x - higher)
      total = total * shrink + jnp.sum(p, -1, keepdims=True)
      if settings.dropout_rate:
        p *= additive_pairs.kept(settings, limits, i, j, p.shape)
      value = _rows(operands.value, column, blocks.columns)
      more = jnp.einsum(
        "bkqd,bkdv->bkqv",
        _grouped(p, num_kv_heads).astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
      ).reshape(result.shape)
      return higher, total, result * shrink + more

    start = (
      jnp.full((*per_row, 1), lowest / 2, jnp.float32),
      jnp.zeros((*per_row, 1), jnp.float32),
      jnp.zeros((*per_row, width), jnp.float32),
    )
    last = _last_column(settings.is_causal, blocks, row)
    maximum, total, result = jax.lax.fori_loop(0, last, of_keys, start)
    empty = total == 0.0
    result = result / jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, jnp.inf, maximum + jnp.log(total))
    return _put(totals[0], result, row), _put(totals[1], lse, row)

  out = jnp.zeros((batch, length, num_heads, width), jnp.float32)
  lse = jnp.zeros((batch, length, num_heads, 1), jnp.float32)
  return jax.lax.fori_loop(0, blocks.num_rows, of_rows, (out, lse))


def _attend_bwd(settings, residuals, cotangent):
  """The backward of the module's docstring."""
  operands, limits, out, lse = residuals
  blocks = _cut(operands)
  length = operands.query.shape[1]
  source_length, num_kv_heads = operands.value.shape[1:3]
  # Once a head and block, not once a pair: v leaves the sums over t and s.
  factor = operands.score[None, :, None, :]

  def of_rows(i, totals):
    row = jnp.minimum(i * blocks.rows, length - blocks.rows)
    query = _rows(operands.query, row, blocks.rows)
    next_row = jnp.minimum((i + 1) * blocks.rows, length - blocks.rows)
    is_last_word = row + jnp.arange(blocks.rows) < next_row
    is_last_word |= i == blocks.num_rows - 1
    g = _rows(cotangent, row, blocks.rows)
    g = jnp.where(is_last_word[None, None, :, None], g, 0)
    row_out, row_lse = (_rows(x, row, blocks.rows) for x in (out, lse))
    delta = jnp.sum(g * row_out, -1, keepdims=True)
    g_rows = _grouped(g, num_kv_heads)

    def of_keys(j, carry):
      totals, dquery = carry
      column = jnp.minimum(j * blocks.columns, source_length - blocks.columns)
      z, x = _scores(operands, query, row, column, blocks)
      allowed = additive_pairs.allowed(
        settings.is_causal, limits, blocks, row, column, j * blocks.columns
      )
      p = jnp.where(allowed, jnp.exp(x - row_lse), 0.0)
      value = _rows(operands.value, column, blocks.columns)
      dp = jnp.einsum(
        "bkqv,bkdv->bkqd",
        g_rows.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
      ).reshape(p.shape)
      dropped = p
      if settings.dropout_rate:
        kept = additive_pairs.kept(settings, limits, i, j, p.shape)
        dp, dropped = dp * kept, p * kept
      dx = p * (dp - delta)
      dvalue = jnp.einsum(
        "bkqd,bkqv->bkdv", _grouped(dropped, num_kv_heads), g_rows
      )
      flat = z.reshape(*z.shape[:2], -1, z.shape[-1])
      dscore = jnp.einsum("bnx,bnxa->bna", dx.reshape(flat.shape[:3]), flat)
      dz = dx[..., None] * (1.0 - z * z)
      totals = Operands(
        query=totals.query,
        key=_add(totals.key, jnp.sum(dz, 2) * factor, column),
        value=_add(totals.value, dvalue, column),
        score=totals.score + jnp.sum(dscore, 0),
        bias=additive_pairs.add_to(totals.bias, dx, row, column, blocks),
      )
      return totals, dquery + jnp.sum(dz, 3) * factor

    last = _last_column(settings.is_causal, blocks, row)
    totals, dquery = jax.lax.fori_loop(
      0, last, of_keys, (totals, jnp.zeros_like(query))
    )
    return totals._replace(query=_add(totals.query, dquery, row))

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
  totals = jax.lax.fori_loop(0, blocks.num_rows, of_rows, zeros)
  return jax.tree.map(lambda d, x: d.astype(x.dtype), totals, operands), None


attend.defvjp(_attend_fwd, _attend_bwd)
