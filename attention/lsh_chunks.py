"""The chunk loop behind `lsh_attention`, with its own backward.

One softmax over ∪_r P_i^(r). The paper takes log N_ij off a logit in each of the
N_ij rounds that show j to i; the N_ij shares of exp(logit) then sum to one. Here
the first of these rounds counts the pair whole and the others skip it, which is
the same sum with fewer operations. With logits a_ij = c_j · x_i·x_j, where
c_j = scale / |x_j|, round r gives

  lse_i^(r) = log Σ_j exp(a_ij),   o_i^(r) = Σ_j exp(a_ij - lse_i^(r)) v_j

and the rounds are joined by lse_i = logΣ_r exp(lse_i^(r)) and out_i =
Σ_r exp(lse_i^(r) - lse_i) o_i^(r). Where the union is empty, out_i = v_i.

Dropout. Δ_ij = keep_ij / (1 - rate), 1 without dropout, goes beside exp(a_ij) in
o_i^(r), not in lse, and beside v_i where the union is empty. A pair is counted
in one chunk of one round, so a key a step gives it one draw, made again in the
backward.

Backward, from the inputs, out and lse only, g the cotangent of out:

  w_ij = exp(a_ij - lse_i)                dv_j = Σ_i w_ij Δ_ij g_i
  u_ij = w_ij (Δ_ij g_i·v_j - g_i·out_i)  y_j  = Σ_i u_ij x_i
  dx_i = Σ_j u_ij c_j x_j + c_i y_i       dc_j = x_j · y_j

Each sum runs over the rounds, chunk by chunk in sorted order, and is brought to
the order of positions once a round.

Speed. The products have the forms that XLA:CPU sends to its fast kernel (see
`blocks`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import blocks, lsh_rows
from attention.lsh_rows import Geometry, Operands, Plan, unsort


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_attention(
  geometry: Geometry, operands: Operands, plan: Plan
) -> Float[Array, "B T N V"]:
  """One softmax over what any round shows; v_i where that is nothing."""
  return _forward(geometry, operands, plan)[0]


def _chunked_fwd(geometry, operands, plan):
  out, lse = _forward(geometry, operands, plan)
  return out, (operands, plan, out, lse)


def _update(x: Array, rows: Array, start: Array) -> Array:
  rows = rows.reshape(*x.shape[:2], -1, *x.shape[3:])
  return jax.lax.dynamic_update_slice_in_dim(x, rows, start, axis=2)


def _kept(
  geometry: Geometry, plan: Plan, r: Array | int, i: Array | int, shape
) -> Float[Array, "..."]:
  """Δ of step i in round r; round `rounds` is for tokens that see no other."""
  return blocks.kept(plan.dropout_rng, geometry.dropout_rate, shape, r, i)


def _forward(
  geometry: Geometry, operands: Operands, plan: Plan
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """The output and the log-sum-exp of every row, +inf where nothing is seen."""
  size = geometry.chunk_size
  batch, length, num_heads, _ = operands.vector.shape
  num_rounds = plan.order.shape[0]
  group, steps = lsh_rows.groups(batch * num_heads, length, size)
  features = operands.value.shape[-1]
  lowest = jnp.finfo(jnp.float32).min

  def step(r, order, allowed, i, carry):
    out, lse = carry
    chunks = lsh_rows.read(geometry, operands, order, allowed, i)
    logits = blocks.dot("nqd,nkd->nqk", chunks.query, chunks.key)
    p, total, row_lse = blocks.exponentials(
      logits * chunks.column[:, None, :], chunks.allowed, by_mask=True
    )
    if geometry.dropout_rate:
      p *= _kept(geometry, plan, r, i, p.shape)
    result = blocks.dot(
      "nqk,nkd->nqd", p.astype(chunks.value.dtype), chunks.value
    )
    result /= jnp.where(total == 0.0, 1.0, total)
    # Of an empty row so low that it has no share in any other.
    row_lse = jnp.where(total == 0.0, lowest / 2, row_lse)
    start = i * group * size
    return _update(out, result, start), _update(lse, row_lse, start)

  def join(r, carry):
    out, lse = carry
    order, place = lsh_rows.round_of(plan, r)
    allowed = lsh_rows.allowed_pairs(geometry, plan, r, order)
    shape = (batch, num_heads, steps * group * size)
    fresh, fresh_lse = jax.lax.fori_loop(
      0,
      steps,
      partial(step, r, order, allowed),
      (
        jnp.zeros((*shape, features), jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
      ),
    )
    fresh_lse = unsort(fresh_lse[..., 0], place - size)
    maximum = jnp.maximum(lse, fresh_lse)
    old, new = jnp.exp(lse - maximum), jnp.exp(fresh_lse - maximum)
    total = old + new
    out = out * (old / total)[..., None]
    out += unsort(fresh, place - size) * (new / total)[..., None]
    return out, maximum + jnp.log(total)

  out, lse = jax.lax.fori_loop(
    0,
    num_rounds,
    join,
    (
      jnp.zeros((batch, length, num_heads, features), jnp.float32),
      jnp.full((batch, length, num_heads), lowest / 2, jnp.float32),
    ),
  )
  alone = lse <= lowest / 4
  value = operands.value
  value = jnp.repeat(value, num_heads // value.shape[2], axis=2)
  # Its whole weight: 1, or NaN where the token is.
  own = jnp.exp(operands.column - operands.column)
  if geometry.dropout_rate:
    own *= _kept(geometry, plan, num_rounds, 0, own.shape)
  out = jnp.where(alone[..., None], own[..., None] * value, out)
  return out.astype(operands.vector.dtype), jnp.where(alone, jnp.inf, lse)


def _chunked_bwd(geometry, residuals, cotangent):
  """The backward of the module's docstring, scores transposed: [keys, rows]."""
  operands, plan, out, lse = residuals
  size = geometry.chunk_size
  batch, length, num_heads, head_dim = operands.vector.shape
  num_rounds = plan.order.shape[0]
  group, steps = lsh_rows.groups(batch * num_heads, length, size)
  kv_heads, features = operands.value.shape[2:]
  delta = blocks.inner(cotangent, out)[..., 0]

  def step(r, order, allowed, i, totals):
    chunks = lsh_rows.read(geometry, operands, order, allowed, i)
    g, row_lse, row_delta = (
      lsh_rows.take(x, chunks.rows) for x in (cotangent, lse, delta)
    )
    row_lse, row_delta = row_lse[:, None, :], row_delta[:, None, :]
    x = chunks.query

    scores = blocks.dot("nkd,nqd->nkq", chunks.key, x)
    column = chunks.column[:, :, None]
    w = jnp.exp(scores * column - row_lse)
    w = jnp.where(chunks.allowed, w, 0.0)
    dw = blocks.dot("nkd,nqd->nkq", chunks.value, g)
    dropped = w
    if geometry.dropout_rate:
      shape = (w.shape[0], size, 2 * size)
      kept = jnp.swapaxes(_kept(geometry, plan, r, i, shape), 1, 2)
      dw, dropped = dw * kept, w * kept
    u = w * (dw - row_delta)
    dv = blocks.dot("nkq,nqd->nkd", dropped.astype(g.dtype), g)
    y = blocks.dot("nkq,nqd->nkd", u.astype(x.dtype), x)
    columns = blocks.turned((u * column).astype(x.dtype))
    dx = blocks.dot("nqk,nkd->nqd", columns, chunks.key)

    total_dx, total_y, total_dv = totals
    start = i * group * size

    def add(total, part):
      # The first half of each belongs to the chunk before.
      part = part.reshape(*total.shape[:2], group, 2, size, -1)
      for half in range(2):
        more = part[:, :, :, half].reshape(*total.shape[:2], group * size, -1)
        place = start + half * size
        more += blocks.cut(total, place, group * size, axis=2)
        total = _update(total, more, place)
      return total

    return (
      _update(total_dx, dx, start + size),
      add(total_y, y),
      add(total_dv, dv),
    )

  def join(r, totals):
    order, place = lsh_rows.round_of(plan, r)
    allowed = lsh_rows.allowed_pairs(geometry, plan, r, order)
    allowed = jnp.swapaxes(allowed, 3, 4)
    shape = (batch, num_heads, plan.order.shape[-1])
    fresh = jax.lax.fori_loop(
      0,
      steps,
      partial(step, r, order, allowed),
      tuple(
        jnp.zeros((*shape, width), jnp.float32)
        for width in (head_dim, head_dim, features)
      ),
    )
    return tuple(
      total + unsort(x, place) for total, x in zip(totals, fresh, strict=True)
    )

  own = jnp.where(jnp.isinf(lse)[..., None], cotangent.astype(jnp.float32), 0.0)
  if geometry.dropout_rate:
    own *= _kept(geometry, plan, num_rounds, 0, lse.shape)[..., None]
  dx, y, dv = jax.lax.fori_loop(
    0,
    num_rounds,
    join,
    (
      jnp.zeros((batch, length, num_heads, head_dim), jnp.float32),
      jnp.zeros((batch, length, num_heads, head_dim), jnp.float32),
      own,
    ),
  )
  dv = dv.reshape(batch, length, kv_heads, -1, features).sum(3)
  gradient = Operands(
    vector=dx + operands.column[..., None] * y,
    column=blocks.inner(operands.vector, y)[..., 0],
    value=dv,
  )
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradient, operands), None


chunked_attention.defvjp(_chunked_fwd, _chunked_bwd)
