"""The two nested block loops behind `flash_attention`, with its own backward.

A softmax is the same with any number taken off its logits, and the maximum of a
row is the number that can never overflow. Most rows need none: with x = scale ·
q kᵀ + bias and A the allowed pairs, a block of C queries runs over blocks of D
keys as

  l' = l + Σ_A e^x        o' = o + Σ_A e^x v        out = o / l,  lse = log l

A row is lost where l leaves (e^-40, e^40): there exponentials overflow, or so
many underflow that digits go. Only then the block is done again with the running
maximum m of the paper's algorithm 1,

  m' = max(m, max_A x)
  l' = e^(m − m') l + Σ_A e^(x − m')
  o' = e^(m − m') o + Σ_A e^(x − m') v       out = o / l,  lse = m + log l

and its lost rows take that result: the others keep theirs, so what a row is
never depends on another row. (lse = +inf and out = 0 for a query that sees
nothing. That is no lost row, and l tells them apart, as no allowed pair adds less
than e^-87.) float16 cannot hold e^40 and always takes the maximum; so does what is
one block of keys, where a query of one key then gets its very value and gradients
of 0. The backward is in `flash_backward`.

Blocks. The last block of queries, or of keys, moves back to end at T, or S, so
that no array is padded. Of a row that two blocks share the later one has the
last word, forward and backward (their dropout differs); a key that two share
counts in the first only. Causal blocks above the diagonal are never visited,
blocks below it need no mask. A mask or bias is read block by block along the
axes that it has.

Axes. The J = N/K query heads of a key head are rows of one product: scores
[B·K, J·C, D] are the same memory as [B, N, C, D], where masks apply.

Speed (XLA:CPU, T 4096). Without maxima the forward takes 0.9 of the time with
them. XLA writes exponentials over the scores only where they are fused with
something, here the floor: alone they take 1.6 times as long. A transposed forward,
whose values would have to be turned, takes 1.1 of the time. Keys and values made
heads-first once, not in blocks, gain nothing at (1,024, 512). With sums as one
more column of the product jax 0.10.2 makes a block one operation, which holds a
quarter and takes a tenth longer.
"""

from functools import partial
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import blocks, flash_scores
from attention.flash_backward import backward
from attention.flash_scores import Limits, Operands, Settings
from attention.flash_visits import over_keys, read_keys, read_queries

_LOWEST = float(jnp.finfo(jnp.float32).min)
_FLOOR = -87.0  # e^-87 is the least number of float32 with all its digits
_LARGEST_SUM = math.exp(40.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_attention(
  settings: Settings, operands: Operands, limits: Limits
) -> Float[Array, "B T N V"]:
  """Exact softmax attention; nothing of T×S is ever held."""
  return _forward(settings, operands, limits)[0]


def _blockwise_fwd(settings, operands, limits):
  out, lse = _forward(settings, operands, limits)
  return out, (operands, limits, out, lse)


def _forward(
  settings: Settings, operands: Operands, limits: Limits
) -> tuple[Float[Array, "B T N V"], Float[Array, "A I Q"]]:
  """The output, and the log-sum-exp of every row by block."""
  batch, length, num_heads, _ = operands.query.shape
  kv_heads, value_dim = operands.value.shape[2:]
  products = batch * kv_heads
  rows = num_heads // kv_heads * settings.rows

  def attend(by_maximum, queries, keys, is_masked, carry):
    maximum, total, out = carry
    key, value = read_keys(settings, operands, limits, keys)
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
    if not by_maximum:
      x = jnp.maximum(x, _FLOOR)
    if is_masked:
      allowed = flash_scores.allowed(settings, limits, queries, keys)
      x = jnp.where(of_pairs(allowed), x, _LOWEST)
    if by_maximum:
      # Not below lowest/2: then no exponential of a hidden pair is exp(0).
      larger = jnp.maximum(maximum, blocks.largest(x, 2, limits.hides))
      decay = jnp.exp(maximum - larger)
      maximum, total, out = larger, total * decay, out * decay
      x -= maximum
    p = jnp.exp(x)
    total += jnp.sum(p, 2, keepdims=True)
    if settings.dropout_rate:
      p *= of_pairs(
        flash_scores.kept(settings, operands, limits, queries, keys)
      )
    p = p.astype(value.dtype)
    return maximum, total, out + blocks.dot("nqk,nkd->nqd", p, value)

  def attend_all(by_maximum, queries, is_needed=None):
    start = (
      jnp.full((products, rows, 1), _LOWEST / 2 if by_maximum else 0.0),
      jnp.zeros((products, rows, 1)),
      jnp.zeros((products, rows, value_dim)),
    )
    step = partial(attend, by_maximum, queries)
    return over_keys(
      settings, operands, limits, queries, step, start, is_needed
    )

  is_one_block = operands.key.shape[1] == settings.width
  has_range = float(jnp.finfo(operands.value.dtype).max) > _LARGEST_SUM

  def step(i, carry):
    out, lse = carry
    queries = read_queries(settings, operands, i)
    if is_one_block or not has_range:
      found = attend_all(True, queries)
    else:
      found = attend_all(False, queries)
      total = found[1]
      is_kept = (total > 1 / _LARGEST_SUM) & (total < _LARGEST_SUM)
      is_lost = ~is_kept & (total != 0.0)
      again = attend_all(True, queries, is_needed=jnp.any(is_lost))
      found = [
        jnp.where(is_lost, y, x) for x, y in zip(found, again, strict=True)
      ]
    maximum, total, result = found
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


def _blockwise_bwd(settings, residuals, cotangent):
  operands, limits, out, lse = residuals
  return backward(settings, operands, limits, out, lse, cotangent), None


blockwise_attention.defvjp(_blockwise_fwd, _blockwise_bwd)
