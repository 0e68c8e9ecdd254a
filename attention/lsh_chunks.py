"""The chunk loop behind `lsh_attention`, with its own backward.

Visible pairs. Round r sorts the tokens by bucket, and by position in a bucket;
p is a token's place in that order and c = p // C its chunk. Position i sees j
in that round, j ∈ P_i^(r), iff both are in one bucket, j ≠ i, and

  c_i - c_j ∈ {0, 1}              in both directions,
  0 ≤ p_i - p_j < C               in the causal form.

Both are one comparison of integers, 0 ≤ code_i - code_j < width, with

  code = c + 2·bucket, width = 2   and   code = p + C·bucket, width = C,

for codes of two buckets are at least `width` apart. A masked token has a code
that no other token is near.

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
in one chunk of one round, so a key a chunk gives it one draw, made again in the
backward.

Backward, from the inputs, out and lse only, g the cotangent of out:

  w_ij = exp(a_ij - lse_i)                dv_j = Σ_i w_ij Δ_ij g_i
  u_ij = w_ij (Δ_ij g_i·v_j - g_i·out_i)  y_j  = Σ_i u_ij x_i
  dx_i = Σ_j u_ij c_j x_j + c_i y_i       dc_j = x_j · y_j

Each sum runs over the rounds, chunk by chunk in sorted order, and is brought to
the order of positions once a round.

Speed. Rows are gathered chunk by chunk, heads beside the batch, which XLA:CPU
does at the speed of a copy; a scatter would take a hundred times as long, so
results are written in sorted order and gathered back through the inverse
permutation. The products have the forms that XLA:CPU sends to its fast kernel
(see `sliding_window_blocks`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import blocks


class Plan(NamedTuple):
  """The sorted orders of all rounds; D = C + P, P the length padded to C.

  Attributes:
    order: the token at each sorted place; a chunk of anything comes first, for
      the first chunk to look back on, and anything from C + T on.
    place: where in `order` a token is.
    code: what visibility is read from, per token.
    dropout_rng: key of the dropout.
  """

  order: Int[Array, "rounds B N D"]
  place: Int[Array, "rounds B N T"]
  code: Int[Array, "rounds B N T"]
  dropout_rng: Array | None = None


class Geometry(NamedTuple):
  """What is known while tracing: C, the `width` of visible codes, the rate."""

  chunk_size: int
  width: int
  dropout_rate: float


class Operands(NamedTuple):
  """The arrays that have a derivative; `column` is scale / |x|."""

  vector: Float[Array, "B T N H"]
  column: Float[Array, "B T N"]
  value: Float[Array, "B T K V"]


class _Chunk(NamedTuple):
  """One chunk of every head; its keys are the L = 2C tokens up to its end."""

  vector: Float[Array, "A L H"]
  column: Float[Array, "A L"]
  value: Float[Array, "A L V"]
  rows: Int[Array, "B N C"]
  allowed: Bool[Array, "A C L"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_attention(
  geometry: Geometry, operands: Operands, plan: Plan
) -> Float[Array, "B T N V"]:
  """One softmax over what any round shows; v_i where that is nothing."""
  return _forward(geometry, operands, plan)[0]


def _chunked_fwd(geometry, operands, plan):
  out, lse = _forward(geometry, operands, plan)
  return out, (operands, plan, out, lse)


def _take(
  x: Float[Array, "B T K *F"], index: Int[Array, "B N C"]
) -> Float[Array, "B N C *F"]:
  """Row `index` of each head n, read from head n // (N/K) of x."""
  batch, num_heads, size = index.shape
  grouped = index.reshape(batch, x.shape[2], -1)
  rows = jax.vmap(jax.vmap(_rows, (1, 0)))(x, grouped)
  return rows.reshape(batch, num_heads, size, *x.shape[3:])


def _rows(x, index):
  return x.at[index].get(mode="promise_in_bounds")


def _unsort(
  x: Float[Array, "B N D *F"], place: Int[Array, "B N T"]
) -> Float[Array, "B T N *F"]:
  """Brings an array in sorted order back to the order of positions."""
  return jax.vmap(jax.vmap(_rows, out_axes=1))(x, place)


def _update(x: Array, rows: Array, start: Array) -> Array:
  rows = rows.reshape(*x.shape[:2], -1, *x.shape[3:])
  return jax.lax.dynamic_update_slice_in_dim(x, rows, start, axis=2)


def _flat(x: Array) -> Array:
  """Batch and heads as one axis A."""
  return x.reshape(-1, *x.shape[2:])


def _read(
  geometry: Geometry, operands: Operands, plan: Plan, r: Array, c: Array
) -> _Chunk:
  """Gathers chunk c of round r."""
  size = geometry.chunk_size
  order = jax.lax.dynamic_index_in_dim(plan.order, r, keepdims=False)
  index = blocks.cut(order, c * size, 2 * size, axis=2)

  key_place = c * size + jnp.arange(2 * size)
  row_place = key_place[size:]
  end = size + operands.vector.shape[1]
  exists = ((key_place >= size) & (key_place < end))[None, :]
  exists &= (row_place < end)[:, None]
  allowed = (exists & (row_place[:, None] != key_place[None, :]))[None]

  codes = jax.vmap(jax.vmap(jax.vmap(_rows)), (0, None))(plan.code, index)

  def near(code, width):
    code = _flat(code)
    # A negative difference is a huge number without its sign.
    ahead = code[:, size:, None] - code[:, None, :]
    return ahead.astype(jnp.uint32) < width

  width = jnp.uint32(geometry.width)
  code = jax.lax.dynamic_index_in_dim(codes, r, keepdims=False)
  allowed &= near(code, width)
  for before in range(plan.code.shape[0] - 1):
    counted = jnp.where(before < r, width, jnp.uint32(0))
    allowed &= ~near(codes[before], counted)
  return _Chunk(
    vector=_flat(_take(operands.vector, index)),
    column=_flat(_take(operands.column, index)),
    value=_flat(_take(operands.value, index)),
    rows=index[:, :, size:],
    allowed=allowed,
  )


def _kept(
  geometry: Geometry, plan: Plan, r: Array | int, c: Array | int, shape
) -> Float[Array, "..."]:
  """Δ of chunk c in round r; round `rounds` is for tokens that see no other."""
  return blocks.kept(plan.dropout_rng, geometry.dropout_rate, shape, r, c)


def _forward(
  geometry: Geometry, operands: Operands, plan: Plan
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """The output and the log-sum-exp of every row, +inf where nothing is seen."""
  size = geometry.chunk_size
  batch, length, num_heads, _ = operands.vector.shape
  num_rounds, *_, places = plan.order.shape
  features = operands.value.shape[-1]
  lowest = jnp.finfo(jnp.float32).min

  def step(r, c, carry):
    out, lse = carry
    chunk = _read(geometry, operands, plan, r, c)
    logits = blocks.dot("nqd,nkd->nqk", chunk.vector[:, size:], chunk.vector)
    logits = jnp.where(chunk.allowed, logits * chunk.column[:, None, :], lowest)
    # Not below lowest/2: all exponentials of an empty row are 0, not exp(0).
    maximum = jnp.maximum(jnp.max(logits, -1, keepdims=True), lowest / 2)
    p = jnp.exp(logits - maximum)
    total = jnp.sum(p, -1, keepdims=True)
    if geometry.dropout_rate:
      p *= _kept(geometry, plan, r, c, p.shape)
    result = blocks.dot(
      "nqk,nkd->nqd", p.astype(chunk.value.dtype), chunk.value
    )
    result /= jnp.where(total == 0.0, 1.0, total)
    row_lse = maximum + jnp.log(jnp.where(total == 0.0, 1.0, total))
    return (
      _update(out, result, c * size),
      _update(lse, row_lse[..., 0], c * size),
    )

  def join(r, carry):
    out, lse = carry
    place = jax.lax.dynamic_index_in_dim(plan.place, r, keepdims=False) - size
    shape = (batch, num_heads, places - size)
    fresh, fresh_lse = jax.lax.fori_loop(
      0,
      places // size - 1,
      partial(step, r),
      (
        jnp.zeros((*shape, features), jnp.float32),
        jnp.zeros(shape, jnp.float32),
      ),
    )
    fresh_lse = _unsort(fresh_lse, place)
    maximum = jnp.maximum(lse, fresh_lse)
    old, new = jnp.exp(lse - maximum), jnp.exp(fresh_lse - maximum)
    total = old + new
    out = out * (old / total)[..., None]
    out += _unsort(fresh, place) * (new / total)[..., None]
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
  num_rounds, *_, places = plan.order.shape
  kv_heads, features = operands.value.shape[2:]
  delta = jnp.sum((cotangent * out).astype(jnp.float32), -1)

  def step(r, c, totals):
    chunk = _read(geometry, operands, plan, r, c)
    g = _flat(_take(cotangent, chunk.rows))
    row_lse = _flat(_take(lse, chunk.rows))[:, None, :]
    row_delta = _flat(_take(delta, chunk.rows))[:, None, :]
    x = chunk.vector[:, size:]

    scores = blocks.dot("nkd,nqd->nkq", chunk.vector, x)
    column = chunk.column[:, :, None]
    w = jnp.exp(scores * column - row_lse)
    w = jnp.where(jnp.swapaxes(chunk.allowed, 1, 2), w, 0.0)
    dw = blocks.dot("nkd,nqd->nkq", chunk.value, g)
    dropped = w
    if geometry.dropout_rate:
      shape = (w.shape[0], size, 2 * size)
      kept = jnp.swapaxes(_kept(geometry, plan, r, c, shape), 1, 2)
      dw, dropped = dw * kept, w * kept
    u = w * (dw - row_delta)
    dv = blocks.dot("nkq,nqd->nkd", dropped.astype(g.dtype), g)
    y = blocks.dot("nkq,nqd->nkd", u.astype(x.dtype), x)
    dx = blocks.dot("nkq,nkd->nqd", (u * column).astype(x.dtype), chunk.vector)

    total_dx, total_y, total_dv = totals

    def add(total, part):
      part = part.reshape(*total.shape[:2], -1, total.shape[-1])
      part += blocks.cut(total, c * size, 2 * size, axis=2)
      return _update(total, part, c * size)

    return (
      _update(total_dx, dx, (c + 1) * size),
      add(total_y, y),
      add(total_dv, dv),
    )

  def join(r, totals):
    place = jax.lax.dynamic_index_in_dim(plan.place, r, keepdims=False)
    shape = (batch, num_heads, places)
    fresh = jax.lax.fori_loop(
      0,
      places // size - 1,
      partial(step, r),
      tuple(
        jnp.zeros((*shape, width), jnp.float32)
        for width in (head_dim, head_dim, features)
      ),
    )
    return tuple(
      total + _unsort(x, place) for total, x in zip(totals, fresh, strict=True)
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
    column=jnp.sum(operands.vector.astype(jnp.float32) * y, -1),
    value=dv,
  )
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradient, operands), None


chunked_attention.defvjp(_chunked_fwd, _chunked_bwd)
