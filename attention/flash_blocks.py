"""The two nested block loops behind `flash_attention`, with its own backward.

Forward, for a block of C queries, over blocks of D keys, A the allowed pairs:

  m' = max(m, max_A x)                 x = scale · q kᵀ + bias
  l' = e^(m − m') l + Σ_A e^(x − m')
  o' = e^(m − m') o + Σ_A e^(x − m') v       out = o / l,  lse = m + log l

(lse = +inf and out = 0 for a query that sees nothing). This is the paper's
algorithm 1. Backward, its algorithm 4, from the inputs, out and lse only, with g
the cotangent of out and Δ the dropout's keep / (1 − rate), 1 without dropout:

  p = e^(x − lse) on A, else 0         dv = (p·Δ)ᵀ g
  δ = Σ g · out                        ds = p · (Δ · (g vᵀ) − δ)
  dq = scale · ds k                    dk = scale · dsᵀ q        dbias = ds

δ is a sum over features although dropout acts on weights, because
Σ_s p Δ (g vᵀ) = g · out.

Blocks. The last block of queries, or of keys, moves back to end at T, or S, so
that no array is padded. Of a row that two blocks share the later one has the
last word, forward and backward (their dropout differs); a key that two share
counts in the first only. Causal blocks above the diagonal are never visited,
blocks below it need no mask. A mask or bias is read block by block along the
axes that it has.

Axes. The J = N/K query heads of a key head are rows of one product: scores
[B·K, J·C, D] are the same memory as [B, N, C, D], where masks apply. The backward
holds them transposed, [B·K, D, J·C], the same memory as [B, K, D, J, C].

Speed (XLA:CPU, T 4096). In the backward, turning keys or values, D × H of each
block, so that every product is a fast one, takes 0.75 to 0.85 of the time of
products in the order of the formulas. The forward takes 0.9 of the time of a
transposed one, whose values would have to be turned, and 0.94 of one without
`blocks.largest`. Bringing keys and values to heads-first arrays once, not in
blocks, would save another tenth of the forward, for a copy of both.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import blocks, flash_scores, relative
from attention.flash_scores import Keys, Limits, Operands, Queries, Settings

_LOWEST = float(jnp.finfo(jnp.float32).min)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_attention(
  settings: Settings, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Exact softmax attention; nothing of T×S is ever held."""
  return _forward(settings, operands, limits)[0]


def _blockwise_fwd(settings, operands, limits):
  out, lse = _forward(settings, operands, limits)
  return out, (operands, limits, out, lse)


def _read_queries(settings: Settings, operands: Operands, i: Array):
  start = jnp.minimum(
    i * settings.rows, operands.query.shape[1] - settings.rows
  )
  query = blocks.cut(operands.query, start, settings.rows)
  return Queries(i, start, blocks.heads_first(query, operands.key.shape[2]))


def _read_keys(
  settings: Settings, operands: Operands, limits: Limits, keys: Keys
) -> tuple[Float[Array, "A D H"], Float[Array, "A D V"]]:
  """A block of keys and values, heads first; zeros where a key mask hides them.

  So not even a NaN that stands in padding gets through.
  """
  arrays = [
    blocks.cut(x, keys.start, settings.width)
    for x in (operands.key, operands.value)
  ]
  mask = limits.mask
  if mask is not None and mask.shape[1] == mask.shape[2] == 1:
    if mask.shape[3] > 1:
      mask = blocks.cut(mask, keys.start, settings.width, axis=3)
    arrays = [jnp.where(mask[:, 0, 0, :, None, None], x, 0) for x in arrays]
  key, value = (blocks.heads_first(x, x.shape[2]) for x in arrays)
  return jax.lax.optimization_barrier((key, value))


def _over_keys(settings, operands, limits, queries, step, carry):
  """Runs `step(keys, is_masked, carry)` over the key blocks that are seen.

  Where only causality or the ragged end limits, the first blocks need no mask.
  """
  source_length = operands.key.shape[1]
  width = settings.width
  is_limited = limits.hides

  def visit(is_masked, j, carry):
    fresh = j * width
    start = jnp.minimum(fresh, source_length - width)
    return step(Keys(j, start, fresh), is_masked, carry)

  # A loop that would have no round is left out: it would be compiled as well.
  seen, whole = source_length, source_length // width
  if settings.is_causal:
    seen = jnp.minimum(seen, queries.start + settings.rows)
    whole = jnp.minimum(whole, (queries.start + 1) // width)
  if is_limited:
    whole = 0
  else:
    carry = jax.lax.fori_loop(0, whole, partial(visit, False), carry)
  if is_limited or settings.is_causal or source_length % width:
    end = (seen + width - 1) // width
    carry = jax.lax.fori_loop(whole, end, partial(visit, True), carry)
  return carry


def _forward(
  settings: Settings, operands: Operands, limits: Limits
) -> tuple[Float[Array, "B T N V"], Float[Array, "A I Q"]]:
  """The output, and the log-sum-exp of every row by block."""
  batch, length, num_heads, _ = operands.query.shape
  kv_heads, value_dim = operands.value.shape[2:]
  products = batch * kv_heads
  rows = num_heads // kv_heads * settings.rows

  def attend(queries, keys, is_masked, carry):
    maximum, total, out = carry
    key, value = _read_keys(settings, operands, limits, keys)
    x = blocks.dot("nqd,nkd->nqk", queries.query, key) * settings.scale

    def of_pairs(y):
      by_head = flash_scores.by_head(settings, operands)
      return blocks.of_pairs(y, by_head, x)

    if operands.bias is not None:
      x += of_pairs(flash_scores.bias_of(settings, operands, queries, keys))
    if operands.relative.given:
      x += flash_scores.relative_logits(
        settings, operands, queries, keys, by_key=False
      )
    if is_masked:
      allowed = flash_scores.allowed(settings, limits, queries, keys)
      x = jnp.where(of_pairs(allowed), x, _LOWEST)
    # Not below lowest/2: then no exponential of a hidden pair is exp(0).
    larger = jnp.maximum(maximum, blocks.largest(x, 2, limits.hides))
    decay = jnp.exp(maximum - larger)
    p = jnp.exp(x - larger)
    total = total * decay + jnp.sum(p, 2, keepdims=True)
    if settings.dropout_rate:
      p *= of_pairs(
        flash_scores.kept(settings, operands, limits, queries, keys)
      )
    p = p.astype(value.dtype)
    out = out * decay + blocks.dot("nqk,nkd->nqd", p, value)
    return larger, total, out

  def step(i, carry):
    out, lse = carry
    queries = _read_queries(settings, operands, i)
    maximum, total, result = _over_keys(
      settings,
      operands,
      limits,
      queries,
      partial(attend, queries),
      (
        jnp.full((products, rows, 1), _LOWEST / 2),
        jnp.zeros((products, rows, 1)),
        jnp.zeros((products, rows, value_dim)),
      ),
    )
    is_empty = total == 0.0
    result /= jnp.where(is_empty, 1.0, total)
    row_lse = jnp.where(is_empty, jnp.inf, maximum + jnp.log(total))
    return (
      blocks.put(
        out, blocks.heads_last(result, batch, settings.rows), queries.start
      ),
      blocks.put(lse, jnp.swapaxes(row_lse, 1, 2), i),
    )

  num_blocks = -(-length // settings.rows)
  out = jnp.zeros((*operands.query.shape[:3], value_dim), operands.query.dtype)
  lse = jnp.zeros((products, num_blocks, rows), jnp.float32)
  return jax.lax.fori_loop(0, num_blocks, step, (out, lse))


def _scores(
  settings: Settings,
  operands: Operands,
  queries: Queries,
  keys: Keys,
  key: Float[Array, "A D H"],
) -> Float[Array, "A D Q"]:
  """The logits of a block, transposed, biases and tables included."""
  x = blocks.dot("nkd,nqd->nkq", key, queries.query) * settings.scale
  if operands.bias is not None:
    bias = flash_scores.bias_of(settings, operands, queries, keys)
    bias = flash_scores.transposed(bias, operands.key.shape[2])
    x = (x.reshape(_by_key(settings, operands)) + bias).reshape(x.shape)
  if operands.relative.given:
    x += flash_scores.relative_logits(
      settings, operands, queries, keys, by_key=True
    )
  return x


def _where_allowed(
  settings: Settings,
  operands: Operands,
  limits: Limits,
  queries: Queries,
  keys: Keys,
  x: Float[Array, "A D Q"],
  otherwise: float,
) -> Float[Array, "A D Q"]:
  """`x`, and `otherwise` for the pairs that do not count."""
  allowed = flash_scores.allowed(settings, limits, queries, keys)
  allowed = flash_scores.transposed(allowed, operands.key.shape[2])
  by_key = x.reshape(_by_key(settings, operands))
  return jnp.where(allowed, by_key, otherwise).reshape(x.shape)


def _kept(
  settings: Settings,
  operands: Operands,
  limits: Limits,
  queries: Queries,
  keys: Keys,
) -> Float[Array, "A D Q"]:
  """Δ of the block."""
  kept = flash_scores.kept(settings, operands, limits, queries, keys)
  kept = flash_scores.transposed(kept, operands.key.shape[2])
  return kept.reshape(kept.shape[0] * kept.shape[1], settings.width, -1)


def _by_key(settings: Settings, operands: Operands) -> tuple[int, ...]:
  """`[B, K, D, J, C]`, where masks and biases apply to transposed scores."""
  batch, _, num_heads, _ = operands.query.shape
  kv_heads = operands.key.shape[2]
  groups = num_heads // kv_heads
  return batch, kv_heads, settings.width, groups, settings.rows


def _blockwise_bwd(settings, residuals, cotangent):
  """The backward of the module's docstring."""
  operands, limits, out, lse = residuals
  batch, length, _, _ = operands.query.shape
  kv_heads = operands.key.shape[2]
  num_blocks = -(-length // settings.rows)

  def attend(queries, g, delta, row_lse, keys, is_masked, carry):
    dq, dk, dv, dbias, dtables = carry
    k, v = _read_keys(settings, operands, limits, keys)
    p = jnp.exp(_scores(settings, operands, queries, keys, k) - row_lse)
    if is_masked:
      p = _where_allowed(settings, operands, limits, queries, keys, p, 0.0)
    dp = blocks.dot("nkd,nqd->nkq", v, g)
    dropped = p
    if settings.dropout_rate:
      kept = _kept(settings, operands, limits, queries, keys)
      dp, dropped = dp * kept, p * kept
    ds = p * (dp - delta)
    if operands.bias is not None:
      by_pair = ds.reshape(_by_key(settings, operands))
      by_pair = jnp.moveaxis(by_pair, 2, 4).reshape(
        flash_scores.by_head(settings, operands)
      )
      dbias = _add_block(dbias, by_pair, queries, keys)
    if operands.relative.given:
      more, dquery = relative.gradients(
        operands.relative,
        queries.query,
        ds,
        keys.start - queries.start,
        settings.rows,
        settings.scale,
      )
      dtables = jax.tree.map(jnp.add, dtables, more)
      if dquery is not None:
        dq += jnp.swapaxes(dquery, 1, 2)
    ds = (ds * settings.scale).astype(queries.query.dtype)
    dq += blocks.over_keys(k, ds)
    block_dk = blocks.dot("nkq,nqd->nkd", ds, queries.query)
    block_dv = blocks.dot("nkq,nqd->nkd", dropped.astype(g.dtype), g)
    dk, dv = (
      blocks.add(total, blocks.heads_last(x, batch, settings.width), keys.start)
      for total, x in ((dk, block_dk), (dv, block_dv))
    )
    return dq, dk, dv, dbias, dtables

  def step(i, carry):
    dq, *others = carry
    queries = _read_queries(settings, operands, i)
    g = blocks.cut(cotangent, queries.start, settings.rows)
    positions = queries.start + jnp.arange(settings.rows)
    next_start = jnp.minimum((i + 1) * settings.rows, length - settings.rows)
    is_last_word = (positions < next_start) | (i == num_blocks - 1)
    g = jnp.where(is_last_word[None, :, None, None], g, 0)
    delta = blocks.inner(g, blocks.cut(out, queries.start, settings.rows))
    delta = jnp.swapaxes(blocks.heads_first(delta, kv_heads), 1, 2)
    block_dq, *others = _over_keys(
      settings,
      operands,
      limits,
      queries,
      partial(
        attend,
        queries,
        blocks.heads_first(g, kv_heads),
        delta,
        blocks.cut(lse, i, 1),
      ),
      (
        jnp.zeros_like(jnp.swapaxes(queries.query, 1, 2), jnp.float32),
        *others,
      ),
    )
    block_dq = blocks.heads_last(
      jnp.swapaxes(block_dq, 1, 2), batch, settings.rows
    )
    return blocks.add(dq, block_dq, queries.start), *others

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
  gradient = Operands(*jax.lax.fori_loop(0, num_blocks, step, tuple(zeros)))
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradient, operands), None


def _add_block(
  total: Float[Array, "..."],
  by_pair: Float[Array, "B N C D"],
  queries: Queries,
  keys: Keys,
) -> Float[Array, "..."]:
  """Adds a block's part of a gradient, summed along what the bias lacks."""
  lacking = tuple(axis for axis in range(4) if total.shape[axis] == 1)
  part = jnp.sum(by_pair, lacking, keepdims=True)
  start = [0, 0, queries.start, keys.start]
  start = [0 if axis in lacking else start[axis] for axis in range(4)]
  part += jax.lax.dynamic_slice(total, start, part.shape)
  return jax.lax.dynamic_update_slice(total, part, start)


blockwise_attention.defvjp(_blockwise_fwd, _blockwise_bwd)
