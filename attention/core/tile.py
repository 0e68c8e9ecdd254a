"""The tile: softmax attention between some queries and the keys they may see.

Every mechanism with a softmax is this step on another choice of keys, and this
is the only place where its arithmetic is written. For one query, with logits x
over the keys A that it may see,

  m = max_A x     l = Σ_A e^(x − m)     o = Σ_A Δ e^(x − m) v
  out = o / l     lse = m + log l       (out = 0, lse = +∞ where A is empty)

Δ is 1, or keep / (1 − rate) with dropout. `forward` may start from the sums of
other keys of the same queries, which it scales by e^(m_before − m): the online
softmax. A softmax is the same with any m, so `forward` also works with none
(`by_maximum=False`), as long as all sums stay in float32's range.

The backward makes the weights again from the log-sum-exp. With g the cotangent
of out and δ = Σ g · out,

  p = e^(x − lse) on A, else 0          dv = (p·Δ)ᵀ g
  dx = p · (Δ · (g vᵀ) − δ)             and dq, dk from dx by the rule of x

δ is a sum over features although dropout acts on weights, because
Σ_s p Δ (g vᵀ) = g · out.

Axes. A tile has C queries of every head and D keys. Queries are `[B, K, Q, H]`,
Q = J·C, the J = N/K heads of a key head one after another. What is known by
pair is `[#B, #K, #J, #C, #D]`. Scores are `[B, K, Q, D]` forward and
`[B, K, D, Q]` backward, which makes every product a fast one on a CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention.core import layout, mods, platform, relative
from attention.core.relative import Relative

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for −∞, so that differences are numbers in an empty row as well."""

_FLOOR = -87.0
"""e^-87 is the least number of float32 that has all its digits."""


class Keys(NamedTuple):
  """What the queries of a tile may attend to.

  Attributes:
    key: `[B, K, D, H]`, or what the score wants in its place.
    value: the values of the same keys.
    bias: added to the logits.
    visible: which pairs count; None is all.
    kept: Δ; None is 1.
    offset: position of the first key less that of the first query, for tables
      by distance.
    start: position of the first query, for a `score_mod`.
  """

  key: Float[Array, "..."]
  value: Float[Array, "B K D V"]
  bias: Float[Array, "#B #K #J #C #D"] | None = None
  visible: Bool[Array, "#B #K #J #C #D"] | None = None
  kept: Float[Array, "B K J C D"] | None = None
  offset: Int[Array, ""] | int = 0
  start: Int[Array, ""] | int = 0


class Sums(NamedTuple):
  """m, l and o of every row."""

  maximum: Float[Array, "*A Q 1"]
  total: Float[Array, "*A Q 1"]
  out: Float[Array, "*A Q V"]


Pull = Callable[[Float[Array, "B K D Q"]], tuple[Array, Array, Any]]
"""Gradients of queries, transposed `[B, K, H, Q]`, of keys, of parameters."""


@runtime_checkable
class Score(Protocol):
  """How the logits of a tile follow from its queries and keys.

  `parameters` is a pytree of what else has a derivative.
  """

  @property
  def is_costly(self) -> bool:
    """Whether logits take so long that the forward never makes them twice."""
    ...

  def logits(
    self, query: Array, keys: Keys, parameters: Any, rows: int
  ) -> Float[Array, "B K Q D"]:
    """The logits without `keys.bias`."""
    ...

  def vjp(
    self, query: Array, keys: Keys, parameters: Any, rows: int
  ) -> tuple[Float[Array, "B K D Q"], Pull]:
    """The logits transposed, and what takes their gradient further."""
    ...


class Product(NamedTuple):
  """x = scale · q kᵀ, and tables by distance: every softmax but additive's.

  With a soft cap c, the product is c · tanh(scale · q kᵀ / c). A `score_mod` takes
  the whole. Its parameters are the tables, a `Relative`.
  """

  scale: float
  is_costly: bool = False
  soft_cap: float | None = None
  score_mod: mods.Traced | None = None

  def logits(
    self,
    query: Float[Array, "B K Q H"],
    keys: Keys,
    parameters: Relative,
    rows: int,
  ) -> Float[Array, "B K Q D"]:
    """See `Score`."""
    x = layout.dot("bkqh,bkdh->bkqd", query, keys.key) * self.scale
    x = self._capped(x)
    if parameters.given:
      x += relative.logits(
        parameters, query, keys.offset, rows, x.shape[3], self.scale
      )
    if self.score_mod is not None:
      by_head = x.reshape(self.score_mod.shape)
      consts = parameters.closed_over
      by_head = self._modified(by_head, consts, keys)
      x = by_head.reshape(x.shape)
    return x

  def vjp(
    self,
    query: Float[Array, "B K Q H"],
    keys: Keys,
    parameters: Relative,
    rows: int,
  ) -> tuple[Float[Array, "B K D Q"], Pull]:
    """See `Score`."""
    key, width = keys.key, keys.key.shape[2]
    x = layout.dot("bkdh,bkqh->bkdq", key, query) * self.scale
    x = product = self._capped(x)
    if parameters.given:
      x += relative.logits(
        parameters, query, keys.offset, rows, width, self.scale, by_key=True
      )
    pull_mod, of_tile = None, ()
    if self.score_mod is not None:
      of_tile = self.score_mod.shape
      by_head = jnp.swapaxes(x, 2, 3).reshape(of_tile)
      by_head, pull_mod = jax.vjp(
        lambda x, consts: self._modified(x, consts, keys),
        by_head,
        parameters.closed_over,
      )
      x = jnp.swapaxes(by_head.reshape(*x.shape[:2], -1, width), 2, 3)

    def pull(dx):
      of_consts = ()
      if pull_mod is not None:
        by_head = jnp.swapaxes(dx, 2, 3).reshape(of_tile)
        by_head, of_consts = pull_mod(by_head)
        dx = jnp.swapaxes(by_head.reshape(*x.shape[:2], -1, width), 2, 3)
        of_consts = tuple(map(_of_number, of_consts, parameters.closed_over))
      of_product = dx
      if self.soft_cap is not None:
        of_product = dx * (1.0 - jnp.square(product / self.soft_cap))
      scaled = (of_product * self.scale).astype(query.dtype)
      dkey = layout.dot("bkdq,bkqh->bkdh", scaled, query)
      if platform.turns_keys(query.shape[2]):
        dquery = layout.dot("bkhd,bkdq->bkhq", layout.turned(key), scaled)
      else:
        dquery = layout.dot("bkdq,bkdh->bkqh", scaled, key)
        dquery = jnp.swapaxes(dquery, 2, 3)
      # The gradient of the sinks is that of whole rows, which `loop` has.
      sinks = jax.tree.map(jnp.zeros_like, parameters.sinks)
      if not parameters.given:
        own = parameters._replace(sinks=sinks, closed_over=of_consts)
        return dquery, dkey, own
      dtables, more = relative.gradients(
        parameters, query, dx, keys.offset, rows, self.scale
      )
      dtables = dtables._replace(sinks=sinks, closed_over=of_consts)
      if more is not None:
        dquery += jnp.swapaxes(more, 2, 3)
      return dquery, dkey, dtables

    return x, pull

  def _modified(self, x: Array, consts: Any, keys: Keys) -> Array:
    assert self.score_mod is not None
    first = keys.start + keys.offset
    return mods.modified(self.score_mod, consts, x, keys.start, first)

  def _capped(self, x: Array) -> Array:
    if self.soft_cap is None:
      return x
    return self.soft_cap * jnp.tanh(x / self.soft_cap)


def _of_number(gradient: Array, x: Array) -> Array:
  """The gradient of an array, zeros in float32 for one of whole numbers."""
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return gradient
  return jnp.zeros(x.shape, jnp.float32)


def forward(
  score: Score,
  query: Float[Array, "B K Q H"],
  keys: Keys,
  parameters: Any,
  rows: int,
  *,
  by_data: bool,
  before: Sums | None = None,
  by_maximum: bool = True,
) -> Sums:
  """m, l and o of a tile.

  Args:
    score: what makes the logits.
    query: C rows of each of the heads of a key head.
    keys: what they may see.
    parameters: of the score.
    rows: C.
    by_data: whether masks or segments, and not positions alone, hide pairs.
    before: sums of other keys of these queries.
    by_maximum: False leaves m at 0, for rows whose sums stay in range.

  Returns:
    The sums of all keys so far. Cost: Q·D·(H+V) multiplications, Q·D numbers.
  """
  x = score.logits(query, keys, parameters, rows)
  if keys.bias is not None:
    x += of_pairs(keys.bias, x, rows)
  if not by_maximum:
    x = jnp.maximum(x, _FLOOR)
  if keys.visible is not None:
    x = jnp.where(of_pairs(keys.visible, x, rows), x, LOWEST)
  maximum = jnp.zeros_like(x[..., :1]) if before is None else before.maximum
  decay = None
  if by_maximum:
    maximum = largest(x, by_data or keys.visible is None)
    # Not below LOWEST/2: then no exponential of a hidden pair is exp(0).
    if keys.visible is not None:
      maximum = jnp.maximum(maximum, LOWEST / 2)
    if before is not None:
      maximum = jnp.maximum(maximum, before.maximum)
      decay = jnp.exp(before.maximum - maximum)
    x -= maximum
  p = jnp.exp(x)
  total = jnp.sum(p, -1, keepdims=True)
  if keys.kept is not None:
    p *= of_pairs(keys.kept, p, rows)
  p = p.astype(keys.value.dtype)
  out = layout.dot("bkqd,bkdv->bkqv", p, keys.value)
  if before is None:
    return Sums(maximum, total, out)
  if decay is None:
    return Sums(maximum, before.total + total, before.out + out)
  return Sums(maximum, before.total * decay + total, before.out * decay + out)


def nothing_yet(
  shape: tuple[int, ...], features: int, by_maximum: bool
) -> Sums:
  """The sums of no keys, for rows of this shape."""
  return Sums(
    jnp.full((*shape, 1), LOWEST / 2 if by_maximum else 0.0, jnp.float32),
    jnp.zeros((*shape, 1), jnp.float32),
    jnp.zeros((*shape, features), jnp.float32),
  )


def with_sinks(sums: Sums, sinks: Float[Array, "N"] | None, rows: int) -> Sums:
  """The sums with one more logit for each head, whose value is 0."""
  if sinks is None:
    return sums
  kv_heads = sums.maximum.shape[-3]
  x = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), rows, axis=1)
  x = jnp.broadcast_to(x[..., None], sums.maximum.shape)
  maximum = jnp.maximum(sums.maximum, x)
  decay = jnp.exp(sums.maximum - maximum)
  total = sums.total * decay + jnp.exp(x - maximum)
  return Sums(maximum, total, sums.out * decay)


def finish(
  sums: Sums,
) -> tuple[Float[Array, "*A Q V"], Float[Array, "*A Q 1"]]:
  """Out and lse; 0 and +∞ for a row that saw nothing."""
  is_empty = sums.total == 0.0
  out = sums.out / jnp.where(is_empty, 1.0, sums.total)
  lse = jnp.where(is_empty, jnp.inf, sums.maximum + jnp.log(sums.total))
  return out, lse


def backward(
  score: Score,
  query: Float[Array, "B K Q H"],
  keys: Keys,
  parameters: Any,
  rows: int,
  *,
  cotangent: Float[Array, "B K Q V"],
  delta: Float[Array, "B K Q"],
  lse: Float[Array, "B K Q"],
  of_largest: Float[Array, "B K Q"] | None = None,
) -> tuple[Float[Array, "B K H Q"], Keys, Any]:
  """Gradients of a tile, from the log-sum-exp of its rows.

  Args:
    score: as in `forward`, with `query`, `keys`, `parameters` and `rows`.
    query: `[B, K, Q, H]`.
    keys: what they may see.
    parameters: of the score.
    rows: C.
    cotangent: g, of out.
    delta: δ = Σ g · out.
    lse: of `finish`, over all keys of the rows.
    of_largest: cotangent of the largest logit of each row, where these are all
      keys of the rows; equal ones share it.

  Returns:
    Those of the queries, transposed; of key, value and bias, as `Keys`, where
    the bias has all its pairs `[B, K, J, C, D]`; of the parameters.
  """
  x, pull = score.vjp(query, keys, parameters, rows)
  by_key = (*x.shape[:3], x.shape[3] // rows, rows)

  def transposed(y):
    return jnp.moveaxis(y, 4, 2)

  if keys.bias is not None:
    x = (x.reshape(by_key) + transposed(keys.bias)).reshape(x.shape)
  p = jnp.exp(x - lse[:, :, None, :])
  if keys.visible is not None:
    visible = transposed(keys.visible)
    p = jnp.where(visible, p.reshape(by_key), 0.0).reshape(p.shape)
  dp = layout.dot("bkdv,bkqv->bkdq", keys.value, cotangent)
  dropped = p
  if keys.kept is not None:
    kept = transposed(keys.kept).reshape(p.shape)
    dp, dropped = dp * kept, p * kept
  dx = p * (dp - delta[:, :, None, :])
  if of_largest is not None:
    dx += _at_largest(x, keys.visible, rows) * of_largest[:, :, None, :]
  dvalue = layout.dot(
    "bkdq,bkqv->bkdv", dropped.astype(cotangent.dtype), cotangent
  )
  dquery, dkey, dparameters = pull(dx)
  dbias = None
  if keys.bias is not None:
    dbias = jnp.moveaxis(dx.reshape(by_key), 2, 4)
  return dquery, Keys(dkey, dvalue, dbias), dparameters


def _at_largest(
  x: Float[Array, "B K D Q"],
  visible: Bool[Array, "#B #K #J #C #D"] | None,
  rows: int,
) -> Float[Array, "B K D Q"]:
  """1 at the largest visible logit of each row, shared by equal ones; else 0."""
  seen = jnp.ones_like(x, bool)
  if visible is not None:
    batch, kv_heads, width, queries = x.shape
    shape = (batch, kv_heads, width, queries // rows, rows)
    seen = jnp.broadcast_to(jnp.moveaxis(visible, 4, 2), shape)
    seen = seen.reshape(x.shape)
  x = jnp.where(seen, x, LOWEST)
  is_largest = (x == jnp.max(x, 2, keepdims=True)) & seen
  count = jnp.sum(is_largest, 2, keepdims=True)
  return is_largest / jnp.maximum(count, 1).astype(jnp.float32)


def of_pairs(
  x: Shaped[Array, "#B #K #J #C #D"], scores: Array, rows: int
) -> Shaped[Array, "B K Q D"]:
  """What is known by pair, for every score.

  It takes the shape of the scores and not they its: only then does XLA write
  their exponentials over them.
  """
  batch, kv_heads, queries, width = scores.shape
  shape = (batch, kv_heads, queries // rows, rows, width)
  return jnp.broadcast_to(x, shape).reshape(scores.shape)


def largest(x: Float[Array, "*A D"], is_plain: bool) -> Float[Array, "*A 1"]:
  """The maximum of each row; a NaN may be passed over.

  It is taken of the larger of a number in the first half and one in the second:
  XLA stores what a reduction reads, and this is half as much. `is_plain` takes
  the maximum itself: where masks or segments hide pairs, XLA would cut their
  block out of the whole for every number, and where nothing is hidden it makes
  the whole softmax one operation.
  """
  if is_plain:
    return jnp.max(x, -1, keepdims=True)
  size = x.shape[-1]
  half = -(-size // 2)
  left = jax.lax.slice_in_dim(x, 0, half, axis=-1)
  right = jax.lax.slice_in_dim(x, size - half, size, axis=-1)
  return jnp.max(jnp.where(left > right, left, right), -1, keepdims=True)
