"""Softmax attention in tiles: the only loop of the softmax family, and its backward.

For one query, with logits x over the keys A that it may see,

  m = max_A x   l = Σ_A e^(x − m)   out = Σ_A Δ e^(x − m) v / l   lse = m + log l

with out = 0 and lse = −∞ where A is empty; Δ is 1, or with dropout 0 or
1 / (1 − rate). Of these only inputs, out and lse are kept, and the backward makes
every tile again. With g the cotangent of out and h that of lse,

  p = e^(x − lse)    dv = (p Δ)ᵀ g    dx = p (Δ g vᵀ − δ),   δ = Σ g · out − h

so whatever joins partial results by their lse (`merge`: global tokens, rings, sinks)
needs no derivative of its own.

A tile is `[B, K, Q, D]`: D keys, and Q = J·C rows, the C queries of each of the
J = N/K query heads of a key head. A block of C queries takes the keys of its span
in one visit, or block after block with an online softmax. The last block of queries
or keys moves back to end with the sequence, so that no array is padded. Where there
is one visit, a GPU or TPU takes several neighbouring tiles in one batched step.
B and K stay two axes, so arrays sharded along either are computed where they are.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import dropout, layout, platform
from attention.derivative import with_backward
from attention.layout import alike, cut, heads_first, heads_last, put
from attention.logits import Logits
from attention.tiles import Grid, grid_of
from attention.visible import Visible

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for −∞, so that differences are numbers in an empty row as well."""

Output = (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]
)
"""What an attention function returns: out, or with `return_lse` (out, lse)."""


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S L V"],
  visible: Visible | None = None,
  logits: Any = None,
  *,
  block: tuple[int | None, int | None] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """Softmax attention of every query to the keys that it sees.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, L, V]`, L a divisor of K.
    visible: which pairs count; None is all.
    logits: how they are scored, a `Logits` or what has its `scores` and `sinks`; the
      sinks are one more logit of each row. None is the product, scaled by 1/√H.
    block: (C, D), queries and keys of a tile; None is the platform's choice.
    dropout_rate: share of weights set to zero.
    dropout_rng: key of the dropout. A pair's draw follows from its example, head and
      positions.

  Returns:
    out in the dtype of `query`, 0 where a query sees nothing, and the log-sum-exp of
    its logits in float32, −∞ there. Both have gradients. Cost: time of all tiles
    visited; memory beside the arrays B·N·C·D float32, forward and backward.
  """
  visible, logits = visible or Visible(), logits or Logits()
  grid = grid_of(query, value, visible, block, dropout_rate)
  shape = (len(query), query.shape[2], grid.rows, grid.width)
  query, scores, fixed = logits.scores(query, visible, shape)
  key, value = visible.readable(key), visible.readable(value)
  others = Others(visible.traced(shape), fixed, dropout_rng)
  inputs = jax.tree.map(jnp.asarray, (query, key, value, scores, others))
  out, lse = _attend(grid)(alike(inputs))
  if logits.sinks is None:
    return out, lse
  return with_sinks(out, lse, logits.sinks)


class Others(NamedTuple):
  """Arguments without a derivative.

  Attributes:
    visible: which pairs count.
    fixed: arrays of a score_mod that are no floats.
    rng: key of the dropout.
  """

  visible: Visible
  fixed: tuple[Any, ...]
  rng: Any


def _attend(grid):
  """`forward` with the derivative that `backward` is."""

  def saving(inputs):
    results = forward(grid, *inputs)
    return results, results

  def gradients(inputs, results, cotangents):
    return *backward(grid, *inputs, *results, *cotangents), inputs[-1]

  return with_backward(saving, gradients)


def _cut_keys(grid, others, arrays, start, visit):
  """Keys, values and scores of a tile, linear in `arrays`."""
  key, value, scores = arrays
  first, _ = grid.first(others.visible, start, visit)
  key, value = (
    platform.apart(heads_first(cut(x, first, grid.width), x.shape[2]))
    for x in (key, value)
  )
  return key, value, scores.cut(start, grid.rows, first, grid.width)


def _pairs(grid, others, start, visit, shape):
  """Positions of a tile, which of its pairs count, and Δ; None is all, and 1."""
  visible, rows, width = others.visible, grid.rows, grid.width
  first, fresh = grid.first(visible, start, visit)
  shown = visible.block(start, rows, first, width, fresh)
  if shown is not None:
    shown = by_score(shown, shape, rows)
  positions = visible.query_start + start, visible.key_start + first
  kept = None
  if grid.dropout_rate:
    kept = dropout.of_pairs(
      others.rng,
      grid.dropout_rate,
      shape[0],
      shape[1] * shape[2] // rows,
      positions[0] + jnp.arange(rows),
      positions[1] + jnp.arange(width),
    ).reshape(shape)
  return positions, shown, kept


def by_score(
  x: Bool[Array, "#B #N #C #D"], shape: tuple[int, ...], rows: int
) -> Bool[Array, "B K Q D"]:
  """What is known by pair, for every score of a tile."""
  batch, kv_heads, queries, width = shape
  by_head = (batch, kv_heads * queries // rows, rows, width)
  return jnp.broadcast_to(x, by_head).reshape(shape)


def shown_pairs(
  shape: tuple[int, int, int, int],
  keep: Bool[Array, "B D"] | None,
  query_ids: Int[Array, "B C"] | None,
  key_ids: Int[Array, "B D"] | None,
  right: int | None = None,
) -> Bool[Array, "B K Q D"] | None:
  """Which scores of one block of C queries and as many keys count; None is all.

  Args:
    shape: that of the scores.
    keep: keys that a mask leaves.
    query_ids: segments of the queries.
    key_ids: segments of the keys.
    right: the key lies at most so far behind the query, as in `Visible`.
  """
  rows = shape[3]
  shown = Visible(
    masks=() if keep is None else (keep[:, None, None],),
    segments=() if key_ids is None else ((query_ids, key_ids),),
    right=right,
  ).block(0, rows, 0, rows)
  return None if shown is None else by_score(shown, shape, rows)


def forward(
  grid: Grid,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S L V"],
  scores: Any,
  others: Others,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """Out and lse. It has no derivative of its own: `attend` has one."""
  arrays = key, value, scores

  def visit(q, start, j, sums):
    k, v, part = _cut_keys(grid, others, arrays, start, j)
    shape = (*q.shape[:3], grid.width)
    positions, shown, kept = _pairs(grid, others, start, j, shape)
    x = part.of_tile(q, k, grid.rows, positions, others.fixed)
    if shown is not None:
      x = jnp.where(shown, x, _LOWEST)
    # Not below LOWEST/2: then no exponential of a hidden pair is exp(0).
    m = jnp.maximum(jnp.max(x, -1, keepdims=True), _LOWEST / 2)
    if sums is not None:
      m = jnp.maximum(m, sums[0])
    p = jnp.exp(x - m)
    total = jnp.sum(p, -1, keepdims=True)
    p = p if kept is None else p * kept
    out = layout.dot("bkqd,bkdv->bkqv", p.astype(v.dtype), v)
    if sums is None:
      return m, total, out
    decay = jnp.exp(sums[0] - m)
    return m, sums[1] * decay + total, sums[2] * decay + out

  def tile(q, start):
    if grid.one_visit:
      m, total, out = visit(q, start, 0, None)
    else:
      column = (*q.shape[:3], 1)
      nothing = (
        jnp.full(column, _LOWEST / 2, jnp.float32),
        jnp.zeros(column, jnp.float32),
        jnp.zeros((*q.shape[:3], value.shape[3]), jnp.float32),
      )
      m, total, out = jax.lax.fori_loop(
        0,
        grid.visits(others.visible, start),
        lambda j, sums: visit(q, start, j, sums),
        alike(nothing, (query, key)),
      )
    is_empty = total == 0.0
    out = out / jnp.where(is_empty, 1.0, total)
    return out, jnp.where(is_empty, -jnp.inf, m + jnp.log(total))

  def step(i, results):
    start = grid.start(i)
    q = grid.split(cut(query, start, grid.size))
    parts = grid.each(tile)(q, grid.starts(i))

    def write(whole, part):
      old = cut(whole, start, grid.size)
      return put(whole, grid.where_new(i, grid.join(part), old), start)

    return tuple(map(write, results, parts))

  shape = query.shape[:3]
  zeros = (
    jnp.zeros((*shape, value.shape[3]), query.dtype),
    jnp.zeros((*shape, 1), jnp.float32),
  )
  zeros = alike(zeros, (query, key))
  out, lse = jax.lax.fori_loop(0, grid.steps, step, zeros)
  return out, lse[..., 0]


def backward(
  grid: Grid,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S L V"],
  scores: Any,
  others: Others,
  out: Float[Array, "B T N V"],
  lse: Float[Array, "B T N"],
  out_grad: Float[Array, "B T N V"],
  lse_grad: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N H"], Array, Array, Any]:
  """Gradients of query, key, value and scores, of all but the query in float32.

  Args:
    grid: as in `forward`, with the arguments after it.
    out: the output over all keys of the rows, of which these may be a part.
    lse: their log-sum-exp.
    out_grad: the cotangent of `out`.
    lse_grad: that of `lse`.
  """
  arrays = key, value, scores
  # A row without keys has no weights: e^(x − ∞).
  lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]

  def visit(j, inputs, start):
    """Gradients of the queries of a tile, and of its keys, values and scores."""
    q, g, delta, row_lse = inputs
    k, v, part = _cut_keys(grid, others, arrays, start, j)
    shape = (*q.shape[:3], grid.width)
    positions, shown, kept = _pairs(grid, others, start, j, shape)
    x, pull = part.vjp(q, k, grid.rows, positions, others.fixed)
    p = jnp.exp(x - row_lse)
    p = p if shown is None else jnp.where(shown, p, 0.0)
    dp = layout.dot("bkqv,bkdv->bkqd", g, v)
    dropped = p
    if kept is not None:
      dp, dropped = dp * kept, p * kept
    # Turning the cotangents keeps this product one of XLA:CPU's fast forms.
    dv = layout.dot(
      "bkvq,bkqd->bkvd", layout.turned(g), dropped.astype(g.dtype)
    )
    dq, dk, dpart = pull(p * (dp - delta))
    dk, dv = (jnp.swapaxes(x, 2, 3) for x in (dk, dv))
    dpart = jax.tree.map(lambda x: x.astype(jnp.float32), dpart)
    return dq, (dk, dv, dpart)

  def step(i, carry):
    dquery, totals = carry
    start = grid.start(i)
    g, o, h = (
      cut(x, start, grid.size) for x in (out_grad, out, lse_grad[..., None])
    )
    delta = layout.inner(g, o) - h
    g, delta = grid.where_new(i, g, 0), grid.where_new(i, delta, 0)
    rows = cut(query, start, grid.size), g, delta, cut(lse, start, grid.size)
    inputs, starts = tuple(map(grid.split, rows)), grid.starts(i)

    def body(j, carry):
      dq, totals = carry
      more, parts = grid.each(partial(visit, j))(inputs, starts)
      return dq + more, _added(grid, others, totals, parts, starts, j)

    dq = alike(jnp.zeros(inputs[0].shape, jnp.float32), (query, key))
    if grid.one_visit:
      dq, totals = body(0, (dq, totals))
    else:
      visits = grid.visits(others.visible, start)
      dq, totals = jax.lax.fori_loop(0, visits, body, (dq, totals))
    place = layout.add if grid.is_ragged else put
    return place(dquery, grid.join(dq), start), totals

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
  carry = jnp.zeros(query.shape, query.dtype), zeros
  carry = alike(carry, (query, key))
  dquery, totals = jax.lax.fori_loop(0, grid.steps, step, carry)
  return dquery, *totals


def _added(grid, others, totals, parts, starts, visit):
  """Totals with the gradients of keys, values and scores of a step."""
  if grid.at_once > 1:
    gather = jax.vmap(
      lambda start, totals: _cut_keys(grid, others, totals, start, visit),
      (0, None),
    )
    (more,) = jax.linear_transpose(partial(gather, starts), totals)(parts)
    return jax.tree.map(jnp.add, totals, more)
  first, _ = grid.first(others.visible, starts, visit)
  key, value = (
    layout.add(total, heads_last(part, grid.width), first)
    for total, part in zip(totals[:2], parts[:2], strict=True)
  )
  return key, value, totals[2].added(parts[2], starts, first)


def merge(
  *parts: tuple[Float[Array, "B T N V"], Float[Array, "B T N"]],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of all keys from those of disjoint sets of keys."""
  outs, lses = zip(*parts, strict=True)
  lse = jnp.stack(lses)
  largest = jnp.maximum(jnp.max(lse, 0), _LOWEST / 2)
  largest = jax.lax.stop_gradient(largest)
  shares = jnp.exp(lse - largest[None])
  total = jnp.sum(shares, 0)
  sees_any = total > 0.0
  total = jnp.where(sees_any, total, 1.0)
  out = sum(shares[i][..., None] * out for i, out in enumerate(outs))
  out = (out / total[..., None]).astype(outs[0].dtype)
  return out, jnp.where(sees_any, largest + jnp.log(total), -jnp.inf)


def with_sinks(
  out: Float[Array, "B T N V"],
  lse: Float[Array, "B T N"],
  sinks: Float[Array, "N"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """One more logit for each head, which takes weight and gives no value."""
  sinks = sinks.astype(jnp.float32)[None, None]
  share = jax.nn.sigmoid(lse - sinks)[..., None]
  return (share * out).astype(out.dtype), jnp.logaddexp(lse, sinks)
