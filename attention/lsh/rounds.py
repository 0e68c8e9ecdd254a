"""The loop of `lsh_attention` over rounds and chunks, with its backward.

It is one softmax over ∪_r P_i^(r). The paper subtracts log N_ij from a logit in
each of the N_ij rounds that show j to i, so that the N_ij shares of exp(logit)
sum to one. Here the first of these rounds counts the whole pair and the others
skip it, which is the same sum with fewer operations.

A tile is the C queries x_i of one chunk, and the 2·C keys k_j = c_j x_j,
c_j = scale / |x_j|, of that chunk and the one before. Round r gives out_i^(r) and
lse_i^(r), and the rounds are joined by

  lse_i = logΣ_r exp(lse_i^(r)),   out_i = Σ_r exp(lse_i^(r) - lse_i) out_i^(r)

Where the union is empty, out_i = v_i.

Dropout is drawn for each chunk of each round. A pair counts in one chunk only,
so it has one draw, which the backward makes again. A token that sees no other
token has a separate draw.

The backward reads inputs, out and lse. With y_j the gradient of k_j, and dx_i
that of x_i as a query,

  gradient of x_i:  dx_i + c_i y_i     gradient of c_j:  x_j · y_j

The gradients of a round are summed chunk by chunk in sorted order, and then
brought to the order of positions once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import dropout, layout
from attention.lsh import chunks as lsh_chunks
from attention.lsh.chunks import Chunks, Sorted

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Stands for −∞, so that differences are numbers in an empty row as well."""

_NOTHING = _LOWEST / 2
"""The log-sum-exp of no keys; its share in a sum with any other is 0."""


class Operands(NamedTuple):
  """The arrays that have a derivative; `factor` is scale / |x|."""

  vector: Float[Array, "B T N H"]
  factor: Float[Array, "B T N"]
  value: Float[Array, "B T K V"]


class Rounds(NamedTuple):
  """How rounds are computed; known while tracing.

  Attributes:
    chunks: how the tokens are cut.
    dropout_rate: share of weights set to zero.
  """

  chunks: Chunks
  dropout_rate: float

  def kept(
    self, rng: Array | None, r: Array, i: Array, heads: tuple[int, int]
  ) -> Float[Array, "B N G C L"] | None:
    """Δ of the chunks of step i in round r; None is 1. `heads` is (B, N)."""
    if rng is None or not self.dropout_rate:
      return None
    size, at_once = self.chunks.size, self.chunks.at_once
    shape = (*heads, size, 2 * size)

    def of_chunk(number):
      return dropout.kept(rng, self.dropout_rate, shape, r, number)

    return jax.vmap(of_chunk, out_axes=2)(i * at_once + jnp.arange(at_once))

  def kept_alone(
    self, rng: Array | None, num_rounds: int, shape: tuple[int, ...]
  ) -> Float[Array, "B T N"]:
    """Δ of tokens that see no other, drawn as the round after the last."""
    if rng is None or not self.dropout_rate:
      return jnp.ones(shape, jnp.float32)
    return dropout.kept(rng, self.dropout_rate, shape, num_rounds, 0)

  def read(
    self,
    operands: Operands,
    order: Int[Array, "B N D"],
    i: Array,
  ) -> tuple[Array, Array, Array, Int[Array, "B N G C"]]:
    """Queries, keys and values of step i, and which tokens the queries are."""
    index = lsh_chunks.step_windows(self.chunks, order, i)
    vector, factor, value = (lsh_chunks.rows(x, index) for x in operands)
    # In float32, so that logits of narrower dtypes are as exact as products.
    key = vector * factor[..., None]
    size = self.chunks.size
    return vector[:, :, :, size:], key, value, index[..., size:]

  def cut(self, allowed: Bool[Array, "B N X Y Z"], i: Array) -> Array:
    """The part of `allowed` for the chunks of step i."""
    at_once = self.chunks.at_once
    return layout.cut(allowed, i * at_once, at_once, axis=2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  rounds: Rounds, operands: Operands, plan: Sorted, rng: Array | None
) -> Float[Array, "B T N V"]:
  """One softmax over the pairs that any round shows; v_i where there is none.

  Args:
    rounds: how rounds are computed.
    operands: the arrays with a derivative.
    plan: the sorted orders of all rounds.
    rng: the key of the dropout.

  Returns:
    `[B, T, N, V]` in the dtype of `operands.vector`.
  """
  return _forward(rounds, operands, plan, rng)[0]


def _attend_fwd(rounds, operands, plan, rng):
  out, lse = _forward(rounds, operands, plan, rng)
  return out, (operands, plan, rng, out, lse)


# A tile has two leading axes, the heads and the chunks of one example, so that no
# two axes are merged.
@jax.vmap
def _attend_tiles(
  query: Float[Array, "N G C H"],
  key: Float[Array, "N G L H"],
  value: Float[Array, "N G L V"],
  allowed: Bool[Array, "N G C L"],
  kept: Float[Array, "N G C L"] | None,
) -> tuple[Float[Array, "N G C V"], Float[Array, "N G C 1"]]:
  """Out and lse of the tiles of an example; 0 and +∞ for a row that sees nothing."""
  x = layout.dot("ngch,nglh->ngcl", query, key)
  x = jnp.where(allowed, x, _LOWEST)
  # Not below LOWEST/2: then no exponential of a hidden pair is exp(0).
  m = jnp.maximum(jnp.max(x, -1, keepdims=True), _LOWEST / 2)
  p = jnp.exp(x - m)
  total = jnp.sum(p, -1, keepdims=True)
  p = p if kept is None else p * kept
  out = layout.dot("ngcl,nglv->ngcv", p.astype(value.dtype), value)
  is_empty = total == 0.0
  out = out / jnp.where(is_empty, 1.0, total)
  return out, jnp.where(is_empty, jnp.inf, m + jnp.log(total))


@jax.vmap
def _pull_tiles(
  query: Float[Array, "N G C H"],
  key: Float[Array, "N G L H"],
  value: Float[Array, "N G L V"],
  allowed: Bool[Array, "N G L C"],
  kept: Float[Array, "N G C L"] | None,
  cotangent: Float[Array, "N G C V"],
  lse: Float[Array, "N G C"],
  delta: Float[Array, "N G C"],
) -> tuple[Array, Array, Array]:
  """Gradients of queries, keys and values, from the lse of whole rows.

  Scores are transposed, which makes every product a fast one on a CPU.
  """
  x = layout.dot("nglh,ngch->nglc", key, query)
  p = jnp.where(allowed, jnp.exp(x - lse[:, :, None, :]), 0.0)
  dp = layout.dot("nglv,ngcv->nglc", value, cotangent)
  dropped = p
  if kept is not None:
    kept = jnp.swapaxes(kept, 2, 3)
    dp, dropped = dp * kept, p * kept
  dx = (p * (dp - delta[:, :, None, :])).astype(query.dtype)
  dvalue = layout.dot(
    "nglc,ngcv->nglv", dropped.astype(cotangent.dtype), cotangent
  )
  dkey = layout.dot("nglc,ngch->nglh", dx, query)
  return layout.dot("nglc,nglh->ngch", dx, key), dkey, dvalue


def _put(x: Array, chunks: Array, start: Array) -> Array:
  """`x` in sorted order with the places of some chunks replaced."""
  chunks = chunks.reshape(*x.shape[:2], -1, *x.shape[3:])
  return layout.put(x, chunks, start, axis=2)


def _forward(
  rounds: Rounds, operands: Operands, plan: Sorted, rng: Array | None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """The output and the log-sum-exp of every row, +∞ where no key is seen."""
  chunks = rounds.chunks
  batch, length, num_heads, _ = operands.vector.shape
  features = operands.value.shape[-1]
  num_rounds = plan.order.shape[0]

  def step(r, order, allowed, i, carry):
    kept = rounds.kept(rng, r, i, (batch, num_heads))
    query, key, value, _ = rounds.read(operands, order, i)
    start = i * chunks.at_once * chunks.size
    found = _attend_tiles(query, key, value, rounds.cut(allowed, i), kept)
    return tuple(_put(x, y, start) for x, y in zip(carry, found, strict=True))

  def join(r, carry):
    out, lse = carry
    order, place = plan.round(r)
    allowed = lsh_chunks.allowed_pairs(chunks, plan, r, order)
    fresh = tuple(
      jnp.zeros((batch, num_heads, chunks.places, width), jnp.float32)
      for width in (features, 1)
    )
    fresh = jax.lax.fori_loop(
      0, chunks.steps, partial(step, r, order, allowed), fresh
    )
    more, more_lse = (lsh_chunks.unsort(x, place - chunks.size) for x in fresh)
    more_lse = jnp.where(jnp.isposinf(more_lse), _NOTHING, more_lse)
    total = jnp.logaddexp(lse, more_lse)
    out = out * jnp.exp(lse - total) + more * jnp.exp(more_lse - total)
    return out, total

  out, lse = jax.lax.fori_loop(
    0,
    num_rounds,
    join,
    (
      jnp.zeros((batch, length, num_heads, features), jnp.float32),
      jnp.full((batch, length, num_heads, 1), _NOTHING, jnp.float32),
    ),
  )
  lse = lse[..., 0]
  is_alone = lse <= _NOTHING / 2
  value = operands.value
  value = jnp.repeat(value, num_heads // value.shape[2], axis=2)
  # The weight of a token for itself: 1, or NaN where the token is NaN.
  own = jnp.exp(operands.factor - operands.factor)
  own *= rounds.kept_alone(rng, num_rounds, own.shape)
  out = jnp.where(is_alone[..., None], own[..., None] * value, out)
  return out.astype(operands.vector.dtype), jnp.where(is_alone, jnp.inf, lse)


def _attend_bwd(rounds, residuals, cotangent):
  operands, plan, rng, out, lse = residuals
  chunks = rounds.chunks
  batch, length, num_heads, head_dim = operands.vector.shape
  num_rounds = plan.order.shape[0]
  kv_heads, features = operands.value.shape[2:]
  delta = layout.inner(cotangent, out)[..., 0]

  def step(r, order, by_key, i, totals):
    kept = rounds.kept(rng, r, i, (batch, num_heads))
    query, key, value, index = rounds.read(operands, order, i)
    rows = (lsh_chunks.rows(x, index) for x in (cotangent, lse, delta))
    dquery, *dkeys = _pull_tiles(
      query, key, value, rounds.cut(by_key, i), kept, *rows
    )
    start = i * chunks.at_once * chunks.size

    def add(total, part):
      # The first half of each chunk's keys belongs to the chunk before.
      for j, half in enumerate(jnp.split(part, 2, axis=3)):
        half = half.reshape(*total.shape[:2], -1, total.shape[3])
        total = layout.add(total, half, start + j * chunks.size, axis=2)
      return total

    return (
      _put(totals[0], dquery, start + chunks.size),
      *(add(x, y) for x, y in zip(totals[1:], dkeys, strict=True)),
    )

  def join(r, totals):
    order, place = plan.round(r)
    allowed = lsh_chunks.allowed_pairs(chunks, plan, r, order)
    # Transposed, like the scores in the backward.
    by_key = jnp.swapaxes(allowed, 3, 4)
    fresh = tuple(
      jnp.zeros((batch, num_heads, order.shape[-1], width), jnp.float32)
      for width in (head_dim, head_dim, features)
    )
    fresh = jax.lax.fori_loop(
      0, chunks.steps, partial(step, r, order, by_key), fresh
    )
    return tuple(
      total + lsh_chunks.unsort(x, place)
      for total, x in zip(totals, fresh, strict=True)
    )

  is_alone = jnp.isinf(lse)[..., None]
  own = rounds.kept_alone(rng, num_rounds, lse.shape)[..., None]
  own = jnp.where(is_alone, own * cotangent.astype(jnp.float32), 0.0)
  nothing = jnp.zeros((batch, length, num_heads, head_dim), jnp.float32)
  dvector, dkey, dvalue = jax.lax.fori_loop(
    0, num_rounds, join, (nothing, nothing, own)
  )
  dvalue = dvalue.reshape(batch, length, kv_heads, -1, features).sum(3)
  gradient = Operands(
    vector=dvector + operands.factor[..., None] * dkey,
    factor=layout.inner(operands.vector, dkey)[..., 0],
    value=dvalue,
  )
  gradient = jax.tree.map(lambda d, x: d.astype(x.dtype), gradient, operands)
  return gradient, None, None


attend.defvjp(_attend_fwd, _attend_bwd)
