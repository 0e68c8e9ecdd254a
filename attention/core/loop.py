"""The loop over tiles: softmax attention of a whole sequence, with its backward.

A mechanism is a `Source`: it says which keys the queries of a tile may see, in
one visit or in several, and this module does the rest. Only inputs, output and
log-sum-exp are kept for the backward, which makes every tile again; nothing of
T×S is ever held.

A step takes n neighbouring tiles, C rows each. On a CPU n is 1. On a GPU or TPU
the n tiles are one batched step (`platform.tiles_at_once`). Their rows are one
slice of the queries, and only the keys are gathered. The last step moves back to
end with the sequence, so no array is padded; the rows that it shares with the
step before count in that one.

Sums without a maximum. A source with several visits adds up e^x as it is, since
most rows need no maximum. A row is lost where its sum leaves (e^-40, e^40):
there exponentials overflow, or so many underflow that digits go. Only then is
its tile done again with the running maximum, and only its lost rows take that
result, so the result of a row never depends on another row. Dtypes that cannot
hold e^40, and scores that are costly to make again, always take the maximum. So
does a single visit: there it costs no pass over the scores of other visits, and
a query with one key gets exactly its value.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention.core import layout, platform, tile
from attention.core.tile import Keys, Score, Sums

_LARGEST_SUM = math.exp(40.0)


class Place(NamedTuple):
  """Which tile is meant.

  Attributes:
    number: of the tile, from 0.
    start: position of its first query.
    visit: number of the visit; 0 where there is only one.
  """

  number: Int[Array, ""] | int
  start: Int[Array, ""] | int
  visit: Int[Array, ""] | int = 0


@runtime_checkable
class Source(Protocol):
  """What the queries of a tile see. Hashable: it is known while tracing.

  `arrays` is a pytree of what has a derivative beside query and parameters, and
  `fixed` one of what has none (masks, segments, a random key).

  Attributes:
    rows: C, at most T.
    at_once: n, with n·C at most T; 1 where there are several visits.
    kv_heads: K.
    score: how logits are made.
    by_data: whether masks or segments hide pairs.
  """

  rows: int
  at_once: int
  kv_heads: int
  score: Score
  by_data: bool

  def visits(
    self, start: Array | int
  ) -> tuple[int | Array, int | Array] | None:
    """How many visits hide no pair, and how many there are in all.

    Those that hide no pair come first. None stands for a single visit.
    """
    ...

  def gather(self, arrays: Any, fixed: Any, place: Place) -> Keys:
    """Key, value and bias of a tile, linear in `arrays`."""
    ...

  def limit(
    self, keys: Keys, fixed: Any, place: Place, *, is_whole: bool
  ) -> Keys:
    """The same keys with `visible`, `kept` and `offset`."""
    ...

  def add(self, totals: Any, gradient: Keys, fixed: Any, place: Place) -> Any:
    """Adds the gradient of `gather` to float32 `totals`, which are like `arrays`."""
    ...


def at_once(length: int, rows: int, tile_bytes: int) -> int:
  """n, the tiles of one step.

  Args:
    length: T.
    rows: C, at most T.
    tile_bytes: what one tile holds.
  """
  count = -(-length // rows)
  most = platform.tiles_at_once(tile_bytes, count)
  # One step for all tiles needs an array of a whole number of tiles.
  steps = max(-(-count // most), 2 if length % rows else 1)
  return -(-count // steps)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  source: Source,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
) -> Float[Array, "B T N V"]:
  """Softmax attention of every query to the keys that its tile sees.

  Args:
    source: which keys.
    query: `[B, T, N, H]`, or what the score wants in its place.
    arrays: what `source.gather` reads.
    parameters: of the score.
    fixed: what has no derivative.

  Returns:
    In the dtype of `query`. Cost: time of all tiles; memory beside the arrays
    n·B·N·C·D float32, D keys a tile.
  """
  return forward(source, query, arrays, parameters, fixed)[0]


def _attend_fwd(source, query, arrays, parameters, fixed):
  out, lse = forward(source, query, arrays, parameters, fixed)
  return out, (query, arrays, parameters, fixed, out, lse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_with_total(
  source: Source,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """`attend`, and the sum that it divides by, for sources of a single visit.

  The sum is l = Σ e^(x − max x), from 1 on, or 0 for a query that sees no key.
  It is not a function of the softmax alone: its gradient reaches the largest logit
  through the maximum as well, dl/dx_s = l (p_s − [x_s = max x]).

  Args:
    source: which keys; its `visits` is None.
    query: as in `attend`, with `arrays`, `parameters` and `fixed`.
    arrays: what `source.gather` reads.
    parameters: of the score.
    fixed: what has no derivative.

  Returns:
    The output in the dtype of `query`, and l in float32. Cost: that of `attend`.
  """
  out, _, total = forward(
    source, query, arrays, parameters, fixed, with_total=True
  )
  return out, total


def _total_fwd(source, query, arrays, parameters, fixed):
  out, lse, total = forward(
    source, query, arrays, parameters, fixed, with_total=True
  )
  return (out, total), (query, arrays, parameters, fixed, out, lse, total)


class _Steps(NamedTuple):
  """How the rows of `query` are cut into steps."""

  rows: int
  at_once: int
  kv_heads: int
  length: int

  @property
  def size(self) -> int:
    """Rows of a step."""
    return self.rows * self.at_once

  @property
  def blocks(self) -> layout.Blocks:
    """The steps as blocks of the sequence."""
    return layout.Blocks(self.length, self.size)

  def places(self, i: Array) -> Place:
    """Where its tiles are."""
    if self.at_once == 1:
      return Place(i, self.blocks.start(i))
    tiles = jnp.arange(self.at_once)
    return Place(
      i * self.at_once + tiles,
      self.blocks.start(i) + tiles * self.rows,
      jnp.zeros_like(tiles),
    )

  def where_new(self, i: Array, x: Array, old: Array | int) -> Array:
    """`x`, but `old` in the rows that belong to the step before."""
    is_new = self.blocks.is_new(i)
    if is_new is None:
      return x
    return jnp.where(is_new[None, :, None, None], x, old)

  def split(self, x: Float[Array, "B X N D"]) -> Float[Array, "..."]:
    """Rows of a step by tile: `[n, B, K, Q, D]`, without n where it is 1."""
    if self.at_once == 1:
      return layout.heads_first(x, self.kv_heads)
    x = x.reshape(x.shape[0], self.at_once, self.rows, *x.shape[2:])
    return jax.vmap(layout.heads_first, (1, None))(x, self.kv_heads)

  def join(self, x: Float[Array, "..."]) -> Float[Array, "B X N D"]:
    """Undoes `split`."""
    if self.at_once == 1:
      return layout.heads_last(x, self.rows)
    x = jax.vmap(layout.heads_last, (0, None), 1)(x, self.rows)
    return x.reshape(x.shape[0], self.size, *x.shape[3:])

  def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one tile, for the tiles of a step."""
    return function if self.at_once == 1 else jax.vmap(function)


def _steps(source: Source, query: Array) -> _Steps:
  return _Steps(source.rows, source.at_once, source.kv_heads, query.shape[1])


def _read(source, arrays, fixed, place, *, is_whole):
  keys = source.gather(arrays, fixed, place)
  return source.limit(keys, fixed, place, is_whole=is_whole)


def forward(
  source: Source,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
  *,
  with_total: bool = False,
) -> list[Float[Array, "B T N D"]]:
  """The output, the log-sum-exp of every row, and l if it is asked for.

  It has no derivative of its own: `attend` and `core.ring` have.
  """
  steps = _steps(source, query)

  def attend_tile(rows, place):
    sums = _sums(source, rows, arrays, parameters, fixed, place)
    sums = tile.with_sinks(sums, _sinks(parameters), source.rows)
    return *tile.finish(sums), *([sums.total] if with_total else [])

  def step(i, carry):
    start = steps.blocks.start(i)
    rows = steps.split(layout.cut(query, start, steps.size))
    found = steps.each(attend_tile)(rows, steps.places(i))
    found = [steps.join(x) for x in found]

    def write(whole, x):
      old = layout.cut(whole, start, steps.size)
      return layout.put(whole, steps.where_new(i, x, old), start)

    return tuple(map(write, carry, found))

  value = jax.eval_shape(
    lambda: _read(source, arrays, fixed, Place(0, 0), is_whole=False).value
  )
  shape = query.shape[:3]
  out = jnp.zeros((*shape, value.shape[-1]), query.dtype)
  of_rows = [jnp.zeros((*shape, 1), jnp.float32)] * (2 if with_total else 1)
  return list(jax.lax.fori_loop(0, steps.blocks.number, step, (out, *of_rows)))


def _sums(
  source: Source,
  query: Float[Array, "B K Q H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
  place: Place,
) -> Sums:
  """m, l and o of the rows of one tile over all of its visits."""

  def attend_once(by_maximum, is_whole, visit, before):
    keys = _read(
      source, arrays, fixed, place._replace(visit=visit), is_whole=is_whole
    )
    return tile.forward(
      source.score,
      query,
      keys,
      parameters,
      source.rows,
      by_data=source.by_data,
      before=before,
      by_maximum=by_maximum,
    )

  visits = source.visits(place.start)
  if visits is None:
    return attend_once(True, False, 0, None)

  value = jax.eval_shape(
    lambda: _read(source, arrays, fixed, place, is_whole=False).value
  )

  def attend_all(by_maximum, visits):
    sums = tile.nothing_yet(query.shape[:3], value.shape[-1], by_maximum)
    return over_visits(partial(attend_once, by_maximum), visits, sums)

  has_range = float(jnp.finfo(value.dtype).max) > _LARGEST_SUM
  if source.score.is_costly or not has_range:
    return attend_all(True, visits)
  found = attend_all(False, visits)
  total = found.total
  is_kept = (total > 1 / _LARGEST_SUM) & (total < _LARGEST_SUM)
  is_lost = ~is_kept & (total != 0.0)
  # This is the exception, so every visit gets its limits: one loop to compile.
  again = attend_all(True, (0, jnp.where(jnp.any(is_lost), visits[1], 0)))
  return jax.tree.map(lambda x, y: jnp.where(is_lost, y, x), found, again)


def over_visits(
  step: Callable[[bool, Array, Any], Any],
  visits: tuple[int | Array, int | Array],
  carry: Any,
) -> Any:
  """Runs `step(is_whole, visit, carry)`: whole visits first, then the others."""
  whole, end = visits
  # A loop without a round would be compiled as well, so it is left out.
  if not (isinstance(whole, int) and whole == 0):
    carry = jax.lax.fori_loop(0, whole, partial(step, True), carry)
  if isinstance(whole, int) and isinstance(end, int) and whole == end:
    return carry
  return jax.lax.fori_loop(whole, end, partial(step, False), carry)


def _attend_bwd(source, residuals, cotangent):
  query, arrays, parameters, fixed, out, lse = residuals
  found = backward(
    source, query, arrays, parameters, fixed, out, lse, cotangent
  )
  return *found, None


def _total_bwd(source, residuals, cotangents):
  query, arrays, parameters, fixed, out, lse, total = residuals
  cotangent, of_total = cotangents
  found = backward(
    source,
    query,
    arrays,
    parameters,
    fixed,
    out,
    lse,
    cotangent,
    of_total * total,
  )
  return *found, None


def backward(
  source: Source,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
  out: Float[Array, "B T N V"],
  lse: Float[Array, "B T N 1"],
  cotangent: Float[Array, "B T N V"],
  of_log_total: Float[Array, "B T N 1"] | None = None,
) -> tuple[Float[Array, "B T N H"], Any, Any]:
  """Gradients of query, arrays and parameters.

  Args:
    source: as in `forward`, with `query`, `arrays`, `parameters` and `fixed`.
    out: the output over all keys of the rows, of which these may be a part.
    lse: their log-sum-exp.
    cotangent: of the output.
    of_log_total: that of log l, where these are all keys.
  """
  steps = _steps(source, query)

  def pull_tile(inputs, place, is_whole):
    rows, g, delta, row_lse, *of_log = inputs
    of_largest = None
    if of_log:
      # log l = lse − max x, and the gradient of lse is p.
      delta -= of_log[0]
      of_largest = -of_log[0][..., 0]
    keys = _read(source, arrays, fixed, place, is_whole=is_whole)
    return tile.backward(
      source.score,
      rows,
      keys,
      parameters,
      source.rows,
      cotangent=g,
      delta=delta[..., 0],
      lse=row_lse[..., 0],
      of_largest=of_largest,
    )

  def once(inputs, places, totals, dparameters):
    """A step whose tiles have one visit each."""
    pull = steps.each(partial(pull_tile, is_whole=False))
    dquery, dkeys, more = pull(inputs, places)
    if steps.at_once > 1:
      more = jax.tree.map(lambda x: jnp.sum(x, 0), more)
    totals = _add(source, steps, totals, dkeys, fixed, places)
    return dquery, totals, jax.tree.map(jnp.add, dparameters, more)

  def walk(inputs, place, totals, dparameters):
    """A step of one tile with several visits."""

    def visit(is_whole, number, carry):
      dquery, totals, dparameters = carry
      here = place._replace(visit=number)
      more, dkeys, of_parameters = pull_tile(inputs, here, is_whole)
      return (
        dquery + more,
        source.add(totals, dkeys, fixed, here),
        jax.tree.map(jnp.add, dparameters, of_parameters),
      )

    dquery = jnp.zeros_like(jnp.swapaxes(inputs[0], 2, 3), jnp.float32)
    carry = (dquery, totals, dparameters)
    visits = source.visits(place.start)
    assert visits is not None  # There are several.
    return over_visits(visit, visits, carry)

  def step(i, carry):
    dquery, totals, dparameters = carry
    start = steps.blocks.start(i)
    g = steps.where_new(i, layout.cut(cotangent, start, steps.size), 0)
    delta = layout.inner(g, layout.cut(out, start, steps.size))
    inputs = [
      layout.cut(query, start, steps.size),
      g,
      delta,
      layout.cut(lse, start, steps.size),
    ]
    if of_log_total is not None:
      of_log = layout.cut(of_log_total, start, steps.size)
      inputs.append(steps.where_new(i, of_log, 0))
    inputs = [steps.split(x) for x in inputs]
    places = steps.places(i)
    several = source.visits(places.start) is not None
    more, totals, dparameters = (walk if several else once)(
      inputs, places, totals, dparameters
    )
    more = steps.join(jnp.swapaxes(more, -2, -1))
    place = layout.add if steps.blocks.is_ragged else layout.put
    return place(dquery, more, start), totals, dparameters

  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32), (arrays, parameters)
  )
  dquery, *others = jax.lax.fori_loop(
    0, steps.blocks.number, step, (jnp.zeros(query.shape, query.dtype), *zeros)
  )
  sinks = _sinks(parameters)
  if sinks is not None:
    delta = layout.inner(cotangent, out)[..., 0]
    share = jnp.exp(sinks[None, None] - lse[..., 0])
    of_sinks = -jnp.sum(share * delta, axis=(0, 1))
    others[1] = others[1]._replace(sinks=of_sinks)
  others = jax.tree.map(_like, tuple(others), (arrays, parameters))
  return dquery, *others


def _like(gradient: Array, x: Array) -> Any:
  """A gradient in the dtype of its array; of whole numbers there is none."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return gradient.astype(x.dtype)
  return np.zeros(x.shape, jax.dtypes.float0)


def _sinks(parameters: Any) -> Float[Array, "N"] | None:
  """A logit for each head that takes weight and has no value, if there is one."""
  return getattr(parameters, "sinks", None)


attend.defvjp(_attend_fwd, _attend_bwd)
attend_with_total.defvjp(_total_fwd, _total_bwd)


def _add(source, steps, totals, gradients, fixed, places):
  """Adds the gradients of the keys of a step.

  Those of several tiles are added at once, by the transpose of their gather.
  """
  if steps.at_once == 1:
    return source.add(totals, gradients, fixed, places)

  def gather(arrays):
    return jax.vmap(lambda place: source.gather(arrays, fixed, place)[:3])(
      places
    )

  (more,) = jax.linear_transpose(gather, totals)(tuple(gradients[:3]))
  return jax.tree.map(jnp.add, totals, more)
