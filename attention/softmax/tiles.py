"""Softmax attention in tiles, and its backward pass.

For one query, with logits x over its visible keys A,

  m = max_A x   l = Σ_A e^(x − m)   out = Σ_A Δ e^(x − m) v / l   lse = m + log l

If A is empty, out = 0 and lse = −∞. Δ is 1 without dropout, and 0 or 1 / (1 − rate)
with it. The backward pass recomputes every tile from the inputs, out and lse. With the
cotangents g of out and h of lse,

  p = e^(x − lse)    dv = (p Δ)ᵀ g    dx = p (Δ g vᵀ − δ),   δ = Σ g · out − h

So merging partial results (`rows.merge`, for global tokens and rings) and adding sinks
(`rows.with_sinks`) need no custom derivative.

A tile `[B, N, C, D]` has C queries and D keys. C queries visit the keys of their span
in one step, or block by block with an online softmax. The last block overlaps the
previous one, so that no array is padded. With one visit, a GPU or TPU computes several
tiles in one batched step (`Tiling`).
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.platform import backend, layout
from attention.platform.derivative import (
  match_varying,
  varying_axes,
  with_backward,
)
from attention.platform.layout import cut, key_dot, put, query_dot
from attention.softmax import dropout
from attention.softmax.logits import Logits
from attention.softmax.mods import match_varying_except_mods
from attention.softmax.rows import merge as merge
from attention.softmax.rows import with_sinks
from attention.softmax.visible import Visible

_ONE_VISIT = 2048
"""The largest number of keys that a block of queries visits in one step."""

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Replaces −∞, so that differences are finite even in an empty row."""


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
  """Softmax attention of each query to its visible keys.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, L, V]`, L a divisor of K.
    visible: the visible pairs; None means all.
    logits: a `Logits`, or an object with `scores` and `sinks`, one more logit of each
      row. None means the product scaled by 1/√H.
    block: (C, D), queries and keys of a tile; None chooses them for the platform.
    dropout_rate: the fraction of weights that are set to zero.
    dropout_rng: random key for dropout; see `dropout.pair_factors`.

  Returns:
    out in the dtype of `query`, and the log-sum-exp of the logits in float32; 0 and −∞
    for a query that sees no key. Both have gradients.

  Cost: time of the visited tiles; memory, in addition to the arrays, B·N·C·D float32.
  """
  visible, logits = visible or Visible(), logits or Logits()
  tiling = make_tiling(query, value, visible, block, dropout_rate)
  shape = (query.shape[0], query.shape[2], tiling.rows, tiling.width)

  def inputs_like(query):
    """Inputs of `forward`; mods are traced for tiles that vary as the query does."""
    scaled, scores, fixed = logits.scores(query, visible, shape)
    key_value = visible.readable(key), visible.readable(value)
    constants = Constants(visible.trace(shape, query), fixed, dropout_rng)
    return jax.tree.map(jnp.asarray, (scaled, *key_value, scores, constants))

  inputs = inputs_like(match_varying(query, (query, key, value)))
  if (axes := varying_axes(inputs)) != varying_axes(inputs[0]):
    # Some other arrays, such as those that a mod closes over, vary over more axes.
    inputs = inputs_like(match_varying(query, inputs))
  if axes:
    inputs = match_varying_except_mods(inputs)
  run = with_backward(partial(forward, tiling), partial(backward, tiling))
  out, lse = run(inputs)
  if logits.sinks is None:
    return out, lse
  return with_sinks(out, lse, logits.sinks)


class Constants(NamedTuple):
  """Arguments without a derivative.

  Attributes:
    visible: the visible pairs.
    score_arrays: the score_mod with only its non-float arrays, or None.
    rng: random key for dropout.
  """

  visible: Visible
  score_arrays: Any
  rng: Any


def forward(tiling: "Tiling", inputs: tuple[Any, ...]) -> tuple[Any, Any]:
  """(out, lse) twice: as the result and as the residuals of `backward`.

  `inputs` are query, key, value, scores and constants.
  """
  query, *arrays, constants = inputs

  def visit(q, start, j, sums):
    first, first_new = tiling.first(constants.visible, start, j)
    tile = _tile(tiling, constants, arrays, q, start, first, first_new)
    k, v, scores, places, pairs, factors = tile
    x = scores.tile(q, k, places, constants.score_arrays)
    if pairs is not None:
      x = jnp.where(pairs, x, _LOWEST)
    # At least LOWEST/2, so that the exponential of a masked pair is never exp(0).
    m = jnp.maximum(jnp.max(x, -1, keepdims=True), _LOWEST / 2)
    if sums is not None:
      m = jnp.maximum(m, sums[0])
    p = jnp.exp(x - m)
    total = jnp.sum(p, -1, keepdims=True)
    p = p if factors is None else p * factors
    out = query_dot("bkqd,bkdv->bkqv", p.astype(v.dtype), v)
    if sums is None:
      return m, total, out
    decay = jnp.exp(sums[0] - m)
    return m, sums[1] * decay + total, sums[2] * decay + out

  def tile(q, start):
    if tiling.one_visit:
      m, total, out = visit(q, start, 0, None)
    else:
      shape = *q.shape[:3], arrays[1].shape[3]
      out = layout.zeros_after(q, q, jnp.float32, shape)
      zeros = out[..., :1]
      m, total, out = jax.lax.fori_loop(
        0,
        tiling.visits(constants.visible, start),
        lambda j, sums: visit(q, start, j, sums),
        (zeros + _LOWEST / 2, zeros, out),
      )
    is_empty = total == 0.0
    out = out / jnp.where(is_empty, 1.0, total)
    return out, jnp.where(is_empty, -jnp.inf, m + jnp.log(total))

  def step(i, results):
    rows = tiling.map(tile)(tiling.take(query, i), tiling.starts(i))
    return [tiling.put(x, i, y) for x, y in zip(results, rows, strict=True)]

  shape = query.shape[:3]
  out = layout.zeros_after(query, query, shape=(*shape, arrays[1].shape[3]))
  lse = layout.zeros_after(query, query, jnp.float32, (*shape, 1))
  out, lse = jax.lax.fori_loop(0, tiling.steps, step, [out, lse])
  return (out, lse[..., 0]), (out, lse[..., 0])


def backward(
  tiling: "Tiling",
  inputs: tuple[Any, ...],
  results: tuple[Float[Array, "B T N V"], Float[Array, "B T N"]],
  cotangents: tuple[Float[Array, "B T N V"], Float[Array, "B T N"]],
) -> tuple[Any, ...]:
  """Gradients of `inputs`; all but the query's are float32.

  `results` are (out, lse) over all keys of the rows; `inputs` may have only some of
  these keys. The constants are returned in place of their gradients.
  """
  query, *arrays, constants = inputs
  (out, lse), (out_grad, lse_grad) = results, cotangents
  # A row without keys has weights of 0: e^(x − ∞).
  lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)

  def visit(j, rows, start):
    """The gradient of queries, the first key, and the gradients of the other arrays."""
    q, g, delta, row_lse = rows
    first, first_new = tiling.first(constants.visible, start, j)
    tile = _tile(tiling, constants, arrays, q, start, first, first_new)
    k, v, scores, places, pairs, factors = tile
    x, pullback = scores.vjp(q, k, places, constants.score_arrays)
    p = jnp.exp(x - row_lse)
    p = p if pairs is None else jnp.where(pairs, p, 0.0)
    dp = query_dot("bkqv,bkdv->bkqd", g, v)
    dropped = p
    if factors is not None:
      dp, dropped = dp * factors, p * factors
    dv = key_dot(dropped.astype(g.dtype), g, v.shape[1])
    dq, dk, dscores = pullback(p * (dp - delta))
    dscores = jax.tree.map(lambda x: x.astype(jnp.float32), dscores)
    return dq, first, (dk, dv, dscores)

  def step(i, carry):
    dquery, totals = carry
    starts = tiling.starts(i)
    q, g, o, h = (
      tiling.take(x, i) for x in (query, out_grad, out, lse_grad[..., None])
    )
    delta = layout.dot("...v,...v->...", g, o)[..., None] - h
    # Rows that the previous step computed get weights of 0.
    rows = q, g, delta, tiling.take(lse[..., None], i, overlap=jnp.inf)

    def body(j, carry):
      dq, totals = carry
      new_dq, firsts, grads = tiling.map(partial(visit, j))(rows, starts)
      grads = starts, firsts, j, grads
      visible, dtype = constants.visible, arrays[0].dtype
      return dq + new_dq, _accumulate(tiling, visible, totals, grads, dtype)

    carry = zeros(q, jnp.float32), totals
    if tiling.one_visit:
      dq, totals = body(0, carry)
    else:
      visits = tiling.visits(constants.visible, starts)
      axes = varying_axes(visits)
      if any(axes - varying_axes(x) for x in jax.tree.leaves(mod)):
        # A tile sums their gradients over devices, which must visit equally many tiles.
        visits = jax.lax.pmax(visits, tuple(axes))
      dq, totals = jax.lax.fori_loop(0, visits, body, carry)
    return tiling.put(dquery, i, dq), totals

  zeros = partial(layout.zeros_after, out_grad)
  totals = jax.tree.map(lambda x: zeros(x, jnp.float32), arrays)
  mod = arrays[2].score_mod
  if mod is not None:
    # Gradients of its arrays vary over the mesh axes of the arrays when it was traced.
    sums = jax.tree.map(
      lambda x: match_varying(jnp.zeros_like(x, jnp.float32), x), mod
    )
    totals[2] = dataclasses.replace(totals[2], score_mod=sums)
  carry = zeros(query), totals
  dquery, totals = jax.lax.fori_loop(0, tiling.steps, step, carry)
  return dquery, *totals, constants


def _tile(tiling, constants, arrays, query, start, first, first_new):
  """The keys, values, scores and positions of a tile, its visible pairs, and Δ.

  None instead of visible pairs means all pairs, and instead of Δ it means 1.
  """
  visible = constants.visible
  key, value = (
    jnp.swapaxes(cut(x, first, tiling.width), 1, 2) for x in arrays[:2]
  )
  scores = arrays[2].cut(start, tiling.rows, first, tiling.width)
  pairs = visible.block(start, tiling.rows, first, tiling.width, first_new)
  places = visible.places(start, first)
  factors = None
  if tiling.dropout_rate:
    factors = dropout.pair_factors(
      constants.rng,
      tiling.dropout_rate,
      query.shape[0],
      query.shape[1],
      places[0] + jnp.arange(tiling.rows),
      places[1] + jnp.arange(tiling.width),
    )
  return key, value, scores, places, pairs, factors


def _accumulate(tiling, visible, totals, grads, dtype):
  """Adds the gradients of a step to totals; those of keys and values in `dtype`."""
  key, value, scores = totals
  starts, firsts, visit, (*key_grads, score_grads) = grads
  if tiling.tiles_per_step > 1:
    if visible.block_mask is not None:  # Tiles may be anywhere.
      blocks = visible.block_mask.visited[tiling.row(starts), visit]
      add = partial(layout.add_blocks, blocks=blocks)
      key_grads = [x.astype(dtype) for x in key_grads]
    else:
      start, first = visible.places(starts[0], 0)
      start = start - first - visible.left
      add = partial(layout.add_tiles, start=start, rows=tiling.rows)

    def tiles(scores):
      cut_tile = partial(scores.cut, rows=tiling.rows, width=tiling.width)
      return jax.vmap(lambda i, j: cut_tile(start=i, first=j))(starts, firsts)

    (score_grads,) = jax.linear_transpose(tiles, scores)(score_grads)
    key, value = map(add, (key, value), key_grads)
    return [key, value, jax.tree.map(jnp.add, scores, score_grads)]
  key, value = (
    layout.add(total, jnp.swapaxes(grad, 1, 2), firsts)
    for total, grad in zip((key, value), key_grads, strict=True)
  )
  return [key, value, scores.accumulate(score_grads, starts, firsts)]


class Tiling(NamedTuple):
  """The division of queries and keys into tiles; static.

  Attributes:
    rows: C.
    width: D.
    length: T.
    source_length: S.
    one_visit: whether D keys cover the span of any C queries.
    tiles_per_step: the number of tiles in a step; 1 unless each has one visit.
    size: the number of queries in a step.
    steps: the number of steps.
    dropout_rate: the fraction of weights that are set to zero.
  """

  rows: int
  width: int
  length: int
  source_length: int
  one_visit: bool
  tiles_per_step: int
  size: int
  steps: int
  dropout_rate: float

  def start(self, i: Array) -> Array:
    """The first query of step i; the last step may overlap the previous one."""
    return jnp.minimum(i * self.size, self.length - self.size)

  def starts(self, i: Array) -> Array:
    """The first query of each tile of step i."""
    start = self.start(i)
    if self.tiles_per_step == 1:
      return start
    return start + self.rows * jnp.arange(self.tiles_per_step)

  def take(
    self, x: Float[Array, "B T N F"], i: Array, overlap: float | None = None
  ) -> Float[Array, "..."]:
    """The rows of step i `[B, N, C, F]`, or `[n, B, N, C, F]` of n tiles.

    `overlap` replaces the rows that the previous step computed.
    """
    x = cut(x, self.start(i), self.size)
    if overlap is not None and self.length % self.size:
      x = jnp.where(self._is_new(i), x, overlap)
    if self.tiles_per_step == 1:
      return jnp.swapaxes(x, 1, 2)
    x = x.reshape(x.shape[0], self.tiles_per_step, self.rows, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, 4)

  def put(
    self, x: Float[Array, "B T N F"], i: Array, rows: Float[Array, "..."]
  ) -> Float[Array, "B T N F"]:
    """Writes the rows of step i to `x`, except for rows of the previous step."""
    if self.tiles_per_step == 1:
      rows = jnp.swapaxes(rows, 1, 2)
    else:
      rows = rows.transpose(1, 0, 3, 2, 4)
      rows = rows.reshape(x.shape[0], self.size, *x.shape[2:])
    if self.length % self.size:
      rows = jnp.where(self._is_new(i), rows, cut(x, self.start(i), self.size))
    return put(x, rows, self.start(i))

  def _is_new(self, i: Array) -> Bool[Array, "1 X 1 1"]:
    is_new = self.start(i) + jnp.arange(self.size) >= i * self.size
    return is_new[None, :, None, None]

  def map(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a `function` of one tile over the tiles of a step."""
    return function if self.tiles_per_step == 1 else jax.vmap(function)

  def visits(self, visible: Visible, start: Array) -> Array | int:
    """The number of key blocks that the queries from `start` on visit."""
    if visible.block_mask is not None:
      visited, counts = visible.block_mask.visited, visible.block_mask.counts
      return visited.shape[1] if counts is None else counts[self.row(start)]
    low, high = visible.span(start, self.rows, self.source_length)
    count = -(-(high - low) // self.width)
    # A static number lets JAX differentiate the loop in reverse.
    return count if isinstance(count, int) else jnp.maximum(0, count)

  def first(
    self, visible: Visible, start: Array, visit: Array | int
  ) -> tuple[Array, Array | int | None]:
    """The first key of a visit, and its first new key; None if all are new."""
    block_mask = visible.block_mask
    if block_mask is not None:
      first_new = block_mask.visited[self.row(start), visit] * self.width
      is_aligned = block_mask.counts is not None
    else:
      low, _ = visible.span(start, self.rows, self.source_length)
      first_new = low + visit * self.width
      is_aligned = visible.left is None
    first = jnp.minimum(first_new, self.source_length - self.width)
    is_aligned = is_aligned and self.source_length % self.width == 0
    return first, None if self.one_visit or is_aligned else first_new

  def row(self, start: Array) -> Array:
    """The index of the block of queries that starts with query `start`."""
    return (start + self.rows - 1) // self.rows


def make_tiling(
  query: Float[Array, "B T N H"],
  value: Float[Array, "B S L V"],
  visible: Visible,
  block: tuple[int | None, int | None] | None = None,
  dropout_rate: float = 0.0,
) -> Tiling:
  """Chooses the `Tiling` of a call; see `attend`."""
  batch, length, num_heads, head_dim = query.shape
  source_length = value.shape[1]
  pair_bytes = 4 * batch * num_heads
  rows, width = block or (None, None)
  one_visit = False
  if visible.block_mask is not None:
    rows, width = visible.block_mask.block_size
  elif visible.left is not None and visible.right is not None:
    reach = visible.left + visible.right
    if visible.positions is None:
      reach = min(visible.left, length) + min(visible.right, source_length)
    rows = rows or backend.WINDOW_ROWS[reach >= backend.WIDE_WINDOW]
    rows = min(rows, length)
    span = min(source_length, rows + reach)
    width = width or min(span, _ONE_VISIT)
    one_visit = width >= span
  if rows is None or width is None:
    least = backend.LEAST_ROWS, backend.LEAST_ROWS // 2
    default = backend.block(pair_bytes, *least, length, source_length)
    rows, width = rows or default[0], width or default[1]
  rows, width = min(rows, length), min(width, source_length)
  one_visit |= width == source_length and visible.block_mask is None
  tiles_per_step = 1
  if visible.block_mask is not None:
    tiles_per_step = visible.block_mask.tiles_per_step
  elif one_visit and width < source_length:
    tile_bytes = pair_bytes * width * (rows + head_dim + value.shape[3])
    count = -(-length // rows)
    tiles_per_step = backend.tiles_per_step(tile_bytes, count)
    if length % rows:
      # A single step would need an array of full tiles.
      tiles_per_step = min(tiles_per_step, -(-count // 2))
  size = rows * tiles_per_step
  steps, sizes = -(-length // size), (rows, width, length, source_length)
  return Tiling(*sizes, one_visit, tiles_per_step, size, steps, dropout_rate)
