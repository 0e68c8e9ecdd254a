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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core import dropout, layout, platform
from attention.core.layout import cut, heads_first, heads_last, put
from attention.logits import Logits
from attention.visible import Visible

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for −∞, so that differences are numbers in an empty row as well."""

_ONE_VISIT = 2048
"""The most keys of a window that a block of queries takes at once."""


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible | None = None,
  logits: Logits | None = None,
  *,
  block: tuple[int | None, int | None] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """Softmax attention of every query to the keys that it sees.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    visible: which pairs count; None is all.
    logits: how they are scored; its sinks are one more logit of each row. None is
      the product, scaled by 1/√H.
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
  grid = _grid(query, key, visible, block, dropout_rate)
  shape = (len(query), query.shape[2], grid.rows, grid.width)
  query, scores, fixed = logits.scores(query, visible, shape)
  key, value = visible.readable(key), visible.readable(value)
  others = _Others(visible.traced(shape), fixed, dropout_rng)
  arrays = jax.tree.map(jnp.asarray, (query, key, value, scores, others))
  out, lse = _attend(grid, *alike(arrays))
  if logits.sinks is None:
    return out, lse
  return with_sinks(out, lse, logits.sinks)


class _Others(NamedTuple):
  """Arguments without a derivative.

  Attributes:
    visible: which pairs count; None is all.
    fixed: arrays of a score_mod that are no floats.
    rng: key of the dropout.
  """

  visible: Visible
  fixed: tuple[Any, ...]
  rng: Any


class _Grid(NamedTuple):
  """How queries and keys are cut; known while tracing.

  Attributes:
    rows: C.
    width: D.
    length: T.
    source_length: S.
    kv_heads: K.
    one_visit: whether D keys hold the span of any C queries.
    at_once: tiles of a step; 1 unless each has one visit.
    dropout_rate: share of weights set to zero.
  """

  rows: int
  width: int
  length: int
  source_length: int
  kv_heads: int
  one_visit: bool
  at_once: int
  dropout_rate: float

  @property
  def size(self) -> int:
    """Queries of a step."""
    return self.rows * self.at_once

  @property
  def steps(self) -> int:
    """How many there are."""
    return -(-self.length // self.size)

  def start(self, i: Array) -> Array:
    """The first query of step i; the last step moves back."""
    return jnp.minimum(i * self.size, self.length - self.size)

  def starts(self, i: Array) -> Array:
    """The first query of its tile, or of each of its tiles."""
    start = self.start(i)
    if self.at_once == 1:
      return start
    return start + self.rows * jnp.arange(self.at_once)

  def split(self, x: Float[Array, "B X N D"]) -> Float[Array, "..."]:
    """Rows of a step by tile: `[n, B, K, Q, D]`, without n where it is 1."""
    if self.at_once == 1:
      return heads_first(x, self.kv_heads)
    x = x.reshape(len(x), self.at_once, self.rows, *x.shape[2:])
    return jax.vmap(heads_first, (1, None))(x, self.kv_heads)

  def join(self, x: Float[Array, "..."]) -> Float[Array, "B X N D"]:
    """Undoes `split`."""
    if self.at_once == 1:
      return heads_last(x, self.rows)
    x = jax.vmap(heads_last, (0, None), 1)(x, self.rows)
    return x.reshape(len(x), self.size, *x.shape[3:])

  def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one tile, for the tiles of a step."""
    return function if self.at_once == 1 else jax.vmap(function)

  def visits(self, visible: Visible, start: Array) -> Array | int:
    """How many blocks of keys the queries from `start` on take."""
    if visible.block_mask is not None:
      return jnp.asarray(visible.block_mask.counts)[self._row(start)]
    low, high = visible.span(start, self.rows, self.source_length)
    return jnp.maximum(0, -(-(high - low) // self.width))

  def first(
    self, visible: Visible, start: Array, visit: Array | int
  ) -> tuple[Array, Array | None]:
    """The first key of a visit, and the first that no visit before has had."""
    if visible.block_mask is not None:
      visited = jnp.asarray(visible.block_mask.visited)
      fresh = visited[self._row(start), visit] * self.width
    else:
      low, _ = visible.span(start, self.rows, self.source_length)
      fresh = low + visit * self.width
    first = jnp.minimum(fresh, self.source_length - self.width)
    from_zero = visible.left is None or visible.block_mask is not None
    is_even = from_zero and self.source_length % self.width == 0
    return first, None if self.one_visit or is_even else fresh

  def _row(self, start: Array) -> Array:
    return (start + self.rows - 1) // self.rows


def _grid(query, key, visible, block, dropout_rate) -> _Grid:
  """How a call is cut."""
  batch, length, num_heads, head_dim = query.shape
  source_length, kv_heads = key.shape[1:3]
  rows, width = block or (None, None)
  one_visit = False
  if visible.block_mask is not None:
    rows, width = visible.block_mask.block_size
  elif visible.left is not None and visible.right is not None:
    reach = min(visible.left, length) + min(visible.right, source_length)
    rows = min(rows or platform.window_rows(reach + 1), length)
    wide = min(source_length, rows + reach)
    width = width or min(wide, _ONE_VISIT)
    one_visit = width >= wide
  if rows is None or width is None:
    chosen = platform.block(
      4 * batch * num_heads,
      platform.LEAST_ROWS,
      # Narrower blocks waste less of what lies above the diagonal.
      platform.LEAST_ROWS // (1 if visible.right is None else 2),
      length,
      source_length,
    )
    rows, width = rows or chosen[0], width or chosen[1]
  rows, width = min(rows, length), min(width, source_length)
  one_visit |= width == source_length and visible.block_mask is None
  at_once = 1
  if one_visit and width < source_length:
    pairs = rows + head_dim + key.shape[3]
    at_once = _at_once(length, rows, 4 * batch * num_heads * pairs * width)
  return _Grid(
    rows,
    width,
    length,
    source_length,
    kv_heads,
    one_visit,
    at_once,
    dropout_rate,
  )


def _at_once(length: int, rows: int, tile_bytes: int) -> int:
  """How many tiles one step takes."""
  count = -(-length // rows)
  most = platform.tiles_at_once(tile_bytes, count)
  # One step for all tiles needs an array of a whole number of tiles.
  steps = max(-(-count // most), 2 if length % rows else 1)
  return -(-count // steps)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(grid, query, key, value, scores, others):
  return _forward(grid, query, key, value, scores, others)


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
    shown = _by_score(shown, shape, rows)
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


def _by_score(
  x: Bool[Array, "#B #N #C #D"], shape: tuple[int, ...], rows: int
) -> Bool[Array, "B K Q D"]:
  """What is known by pair, for every score of a tile."""
  batch, kv_heads, queries, width = shape
  by_head = (batch, kv_heads * queries // rows, rows, width)
  return jnp.broadcast_to(x, by_head).reshape(shape)


def _forward(grid, query, key, value, scores, others):
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
    return tuple(
      put(whole, grid.join(part), start)
      for whole, part in zip(results, parts, strict=True)
    )

  shape = query.shape[:3]
  zeros = (
    jnp.zeros((*shape, value.shape[3]), query.dtype),
    jnp.zeros((*shape, 1), jnp.float32),
  )
  zeros = alike(zeros, (query, key))
  out, lse = jax.lax.fori_loop(0, grid.steps, step, zeros)
  return out, lse[..., 0]


def _attend_fwd(grid, *arguments):
  out, lse = _forward(grid, *arguments)
  return (out, lse), (*arguments, out, lse)


def _attend_bwd(grid, residuals, cotangents):
  query, key, value, scores, others, out, lse = residuals
  out_grad, lse_grad = cotangents
  arrays = key, value, scores
  # A row without keys has no weights: e^(x − ∞).
  lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]

  def visit(inputs, start, j):
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

  def once(inputs, starts, totals):
    """A step whose tiles have one visit each."""
    dq, parts = grid.each(lambda inputs, start: visit(inputs, start, 0))(
      inputs, starts
    )
    return dq, _added(grid, others, totals, parts, starts, 0)

  def walk(inputs, start, totals):
    """A step of one tile with several visits."""

    def body(j, carry):
      dq, totals = carry
      more, parts = visit(inputs, start, j)
      return dq + more, _added(grid, others, totals, parts, start, j)

    dq = alike(jnp.zeros(inputs[0].shape, jnp.float32), (query, key))
    visits = grid.visits(others.visible, start)
    return jax.lax.fori_loop(0, visits, body, (dq, totals))

  def step(i, carry):
    dquery, totals = carry
    start = grid.start(i)
    g, o, h = (
      cut(x, start, grid.size) for x in (out_grad, out, lse_grad[..., None])
    )
    delta = layout.inner(g, o) - h
    if grid.length % grid.size:
      # Rows that the step before has had do not count again.
      is_new = start + jnp.arange(grid.size) >= i * grid.size
      is_new = is_new[None, :, None, None]
      g, delta = jnp.where(is_new, g, 0), jnp.where(is_new, delta, 0)
    rows = cut(query, start, grid.size), g, delta, cut(lse, start, grid.size)
    inputs = tuple(grid.split(x) for x in rows)
    dq, totals = (once if grid.one_visit else walk)(
      inputs, grid.starts(i), totals
    )
    place = layout.add if grid.length % grid.size else put
    return place(dquery, grid.join(dq), start), totals

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
  carry = jnp.zeros(query.shape, query.dtype), zeros
  carry = alike(carry, (query, key))
  dquery, totals = jax.lax.fori_loop(0, grid.steps, step, carry)
  totals = jax.tree.map(lambda grad, x: grad.astype(x.dtype), totals, arrays)
  return dquery, *totals, None


_attend.defvjp(_attend_fwd, _attend_bwd)


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
  out = sum(
    share[..., None] * out for share, out in zip(shares, outs, strict=True)
  )
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


def alike(tree: Any, like: Any = None) -> Any:
  """The arrays, varying over all mesh axes that any of them (or of `like`) does.

  Inside `jax.shard_map`, loops and custom derivatives want one type of all.
  """

  def varying(x):
    return jax.typeof(x).manual_axis_type.varying

  leaves = jax.tree.leaves(tree if like is None else like)
  axes = frozenset().union(*map(varying, leaves))

  def vary(x):
    lacking = tuple(axes - varying(x))
    return jax.lax.pcast(x, lacking, to="varying") if lacking else x

  return jax.tree.map(vary, tree)
