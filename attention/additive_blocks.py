"""The block loop behind `additive_attention`, with its own backward.

Forward. With a = W q (one a query) and c = U k (one a key) already projected to
A numbers a head, a loop over blocks of C queries holds one loop over blocks of
D keys, the only place where C·D·A numbers exist:

  z = tanh(a_t + c_s)      x = v·z + bias      M the allowed pairs
  m = max_M x,   l = Σ_M exp(x - m),   out = Σ_M exp(x - m) value / l

m, l and the sum are carried from one block of keys to the next (online
softmax), and lse = m + log l is kept: +inf for a row without keys, whose out is
0. The blocks at the end of a sequence move back to end with it, so nothing is
padded; a pair that two blocks of keys share counts in the first only, and rows
that two blocks of queries share are written twice alike.

Backward, from the inputs, out and lse, with g the cotangent of out, block by
block again:

  p = exp(x - lse) on M, else 0         dvalue = pᵀ g
  δ = Σ g·out                           dx = p · (g valueᵀ - δ)  = dbias
  dz = dx · v · (1 - z²)                da_t = Σ_s dz,   dc_s = Σ_t dz
  dv = Σ_ts dx · z

Rows shared by two blocks of queries have g = 0 in the second.

Speed. The hyperbolic tangent is all of the time. A block of 16 queries and 64
keys stays in the cache; one of 64 by 64 takes a third longer. The sum over A is
a matrix product: as a reduction it takes twice as long.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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


class Limits(NamedTuple):
  """Who may see whom beside causality; `mask` has each axis full or 1."""

  mask: Bool[Array, "..."] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None


class _Blocks(NamedTuple):
  """How the lengths are cut: sizes of a block and number of blocks."""

  rows: int
  columns: int
  num_rows: int
  num_columns: int


def _cut(operands: Operands) -> _Blocks:
  length, source_length = operands.query.shape[1], operands.key.shape[1]
  rows, columns = min(QUERIES, length), min(KEYS, source_length)
  return _Blocks(
    rows, columns, -(-length // rows), -(-source_length // columns)
  )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  is_causal: bool, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Additive attention of projected queries and keys, in float32.

  Args:
    is_causal: query t sees keys s ≤ t.
    operands: what is differentiated.
    limits: what is not.

  Returns:
    `[B, T, N, V]`; zeros for a query that sees nothing.

  Cost: time T·S·N·(A+V), memory B·N·C·D·A beside the arrays.
  """
  return _forward(is_causal, operands, limits)[0]


def _attend_fwd(is_causal, operands, limits):
  out, lse = _forward(is_causal, operands, limits)
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


def _corner(x: Array, row: Array | int, column: Array | int) -> list:
  """Where the pairs from (row, column) on start in `x [B|1, N|1, T|1, S|1]`."""
  return [0, 0, row if x.shape[2] > 1 else 0, column if x.shape[3] > 1 else 0]


def _pairs(x: Array, row: Array | int, column: Array | int, blocks: _Blocks):
  """The block of `x [B|1, N|1, T|1, S|1]` at (row, column)."""
  size = (
    *x.shape[:2],
    min(x.shape[2], blocks.rows),
    min(x.shape[3], blocks.columns),
  )
  return jax.lax.dynamic_slice(x, _corner(x, row, column), size)


def _allowed(
  is_causal: bool,
  limits: Limits,
  blocks: _Blocks,
  row: Array | int,
  column: Array | int,
  first: Array | int,
) -> Bool[Array, "..."]:
  """Which pairs of a block count; keys before `first` had their turn."""
  t = row + jnp.arange(blocks.rows)[:, None]
  s = column + jnp.arange(blocks.columns)[None, :]
  allowed = s >= first
  if is_causal:
    allowed = allowed & (s <= t)
  allowed = allowed[None, None]
  if limits.mask is not None:
    allowed = allowed & _pairs(limits.mask, row, column, blocks)
  if limits.query_segments is not None and limits.key_segments is not None:
    of_rows = jax.lax.dynamic_slice_in_dim(
      limits.query_segments, row, blocks.rows, 1
    )
    of_keys = jax.lax.dynamic_slice_in_dim(
      limits.key_segments, column, blocks.columns, 1
    )
    same = of_rows[:, :, None] == of_keys[:, None, :]
    allowed = allowed & same[:, None]
  return allowed


def _scores(
  operands: Operands,
  query: Float[Array, "B N C A"],
  row: Array | int,
  column: Array | int,
  blocks: _Blocks,
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
    x = x + _pairs(operands.bias, row, column, blocks).astype(x.dtype)
  return z, x


def _grouped(x: Float[Array, "B N C D"], num_kv_heads: int) -> Array:
  """`[B, K, N/K·C, D]`: the heads that share a value head are its rows."""
  return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[3])


def _last_column(
  is_causal: bool, blocks: _Blocks, row: Array | int
) -> Array | int:
  """The number of blocks of keys that the rows from `row` on look at."""
  if not is_causal:
    return blocks.num_columns
  seen = (row + blocks.rows + blocks.columns - 1) // blocks.columns
  return jnp.minimum(seen, blocks.num_columns)


def _forward(
  is_causal: bool, operands: Operands, limits: Limits
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
      allowed = _allowed(
        is_causal, limits, blocks, row, column, j * blocks.columns
      )
      x = jnp.where(allowed, x, lowest)
      # Not below lowest/2, where it starts: all exponentials of an empty row
      # are 0, not exp(0).
      higher = jnp.maximum(maximum, jnp.max(x, -1, keepdims=True))
      shrink = jnp.exp(maximum - higher)
      p = jnp.exp(x - higher)
      value = _rows(operands.value, column, blocks.columns)
      more = jnp.einsum(
        "bkqd,bkdv->bkqv",
        _grouped(p, num_kv_heads).astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
      ).reshape(result.shape)
      total = total * shrink + jnp.sum(p, -1, keepdims=True)
      return higher, total, result * shrink + more

    start = (
      jnp.full((*per_row, 1), lowest / 2, jnp.float32),
      jnp.zeros((*per_row, 1), jnp.float32),
      jnp.zeros((*per_row, width), jnp.float32),
    )
    last = _last_column(is_causal, blocks, row)
    maximum, total, result = jax.lax.fori_loop(0, last, of_keys, start)
    empty = total == 0.0
    result = result / jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, jnp.inf, maximum + jnp.log(total))
    return _put(totals[0], result, row), _put(totals[1], lse, row)

  out = jnp.zeros((batch, length, num_heads, width), jnp.float32)
  lse = jnp.zeros((batch, length, num_heads, 1), jnp.float32)
  return jax.lax.fori_loop(0, blocks.num_rows, of_rows, (out, lse))


def _attend_bwd(is_causal, residuals, cotangent):
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
    is_new = row + jnp.arange(blocks.rows) >= i * blocks.rows
    g = _rows(cotangent, row, blocks.rows)
    g = jnp.where(is_new[None, None, :, None], g, 0)
    row_out, row_lse = (_rows(x, row, blocks.rows) for x in (out, lse))
    delta = jnp.sum(g * row_out, -1, keepdims=True)
    g_rows = _grouped(g, num_kv_heads)

    def of_keys(j, carry):
      totals, dquery = carry
      column = jnp.minimum(j * blocks.columns, source_length - blocks.columns)
      z, x = _scores(operands, query, row, column, blocks)
      allowed = _allowed(
        is_causal, limits, blocks, row, column, j * blocks.columns
      )
      p = jnp.where(allowed, jnp.exp(x - row_lse), 0.0)
      value = _rows(operands.value, column, blocks.columns)
      dp = jnp.einsum(
        "bkqv,bkdv->bkqd",
        g_rows.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
      )
      dx = p * (dp.reshape(p.shape) - delta)
      dvalue = jnp.einsum("bkqd,bkqv->bkdv", _grouped(p, num_kv_heads), g_rows)
      flat = z.reshape(*z.shape[:2], -1, z.shape[-1])
      dscore = jnp.einsum("bnx,bnxa->bna", dx.reshape(flat.shape[:3]), flat)
      dz = dx[..., None] * (1.0 - z * z)
      totals = Operands(
        query=totals.query,
        key=_add(totals.key, jnp.sum(dz, 2) * factor, column),
        value=_add(totals.value, dvalue, column),
        score=totals.score + jnp.sum(dscore, 0),
        bias=_add_pairs(totals.bias, dx, row, column, blocks),
      )
      return totals, dquery + jnp.sum(dz, 3) * factor

    last = _last_column(is_causal, blocks, row)
    totals, dquery = jax.lax.fori_loop(
      0, last, of_keys, (totals, jnp.zeros_like(query))
    )
    return totals._replace(query=_add(totals.query, dquery, row))

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
  totals = jax.lax.fori_loop(0, blocks.num_rows, of_rows, zeros)
  return jax.tree.map(lambda d, x: d.astype(x.dtype), totals, operands), None


def _add_pairs(
  total: Array | None,
  block: Float[Array, "B N C D"],
  row: Array | int,
  column: Array | int,
  blocks: _Blocks,
) -> Array | None:
  """Adds a block of pairs to the gradient of a bias, summed where it is 1."""
  if total is None:
    return None
  axes = tuple(i for i in range(4) if total.shape[i] == 1)
  block = jnp.sum(block, axes, keepdims=True)
  block = block + _pairs(total, row, column, blocks)
  return jax.lax.dynamic_update_slice(total, block, _corner(total, row, column))


attend.defvjp(_attend_fwd, _attend_bwd)
