"""The backward of `flash_attention`, by blocks as its forward.

The paper's algorithm 4, from the inputs, out and lse only, with g the cotangent
of out, A the allowed pairs and Δ the dropout's keep / (1 − rate), 1 without
dropout:

  p = e^(x − lse) on A, else 0         dv = (p·Δ)ᵀ g
  δ = Σ g · out                        ds = p · (Δ · (g vᵀ) − δ)
  dq = scale · ds k                    dk = scale · dsᵀ q        dbias = ds

δ is a sum over features although dropout acts on weights, because
Σ_s p Δ (g vᵀ) = g · out.

Scores are held transposed, [B·K, D, J·C], the same memory as [B, K, D, J, C].

Speed (XLA:CPU, T 4096). Turning keys or values, D × H of each block, so that
every product is a fast one, takes 0.75 to 0.85 of the time of products in the
order of the formulas.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import blocks, flash_scores, flash_visits, relative
from attention.flash_scores import Keys, Limits, Operands, Queries, Settings


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
) -> Float[Array, "A D Q"]:
  """`x`, and 0 for the pairs that do not count."""
  allowed = flash_scores.allowed(settings, limits, queries, keys)
  allowed = flash_scores.transposed(allowed, operands.key.shape[2])
  by_key = x.reshape(_by_key(settings, operands))
  return jnp.where(allowed, by_key, 0.0).reshape(x.shape)


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


def backward(
  settings: Settings,
  operands: Operands,
  limits: Limits,
  out: Float[Array, "B T N V"],
  lse: Float[Array, "A I Q"],
  cotangent: Float[Array, "B T N V"],
) -> Operands:
  """The gradients of all operands, each in its own dtype."""
  batch, length, _, _ = operands.query.shape
  kv_heads = operands.key.shape[2]
  num_blocks = -(-length // settings.rows)

  def attend(queries, g, delta, row_lse, keys, is_masked, carry):
    dq, dk, dv, dbias, dtables = carry
    k, v = flash_visits.read_keys(settings, operands, limits, keys)
    p = jnp.exp(_scores(settings, operands, queries, keys, k) - row_lse)
    if is_masked:
      p = _where_allowed(settings, operands, limits, queries, keys, p)
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
    queries = flash_visits.read_queries(settings, operands, i)
    g = blocks.cut(cotangent, queries.start, settings.rows)
    positions = queries.start + jnp.arange(settings.rows)
    next_start = jnp.minimum((i + 1) * settings.rows, length - settings.rows)
    is_last_word = (positions < next_start) | (i == num_blocks - 1)
    g = jnp.where(is_last_word[None, :, None, None], g, 0)
    delta = blocks.inner(g, blocks.cut(out, queries.start, settings.rows))
    delta = jnp.swapaxes(blocks.heads_first(delta, kv_heads), 1, 2)
    block_dq, *others = flash_visits.over_keys(
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
  return jax.tree.map(lambda d, x: d.astype(x.dtype), gradient, operands)


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
