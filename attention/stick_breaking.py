"""Stick-breaking attention (Tan et al., 2024): no softmax and no positions.

A tile is C queries and C keys. Queries visit the tiles to their left
(`scan.scan_leftward`) and carry their remaining weight, the rest of the stick.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import dense
from attention.mechanism import Attention, no_variables
from attention.platform import backend
from attention.platform.blocks import join_blocks, split_blocks
from attention.platform.layout import query_dot, zero_masked
from attention.recurrent.scan import scan_leftward
from attention.softmax.cache import append
from attention.softmax.visible import visible_in_tile

_MASKED = -1e30
"""The logit of a masked key, which takes no weight."""

BLOCK = 128
"""The default of C on a CPU."""


@attention_function
def stick_breaking_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  attend_current: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Each key, from nearest to farthest, takes a share of the remaining weight.

    out = stick_breaking_attention(q, k, v)

    β_ts = σ(scale · q_t · k_s)
    A_ts = β_ts · Π_{s<j<t} (1 − β_tj)        out_t = Σ_{s<t} A_ts v_s

  A row of A sums to at most 1: the weight that remains after the first key has no
  value. Recent keys come first, so positions are not needed. With softplus(x) =
  log(1 + e^x),

    log A_ts = −softplus(−x_ts) − Σ_{s<j<t} softplus(x_tj)        x = scale · q · k

  in float32 for inputs of any dtype, without differences of sums.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    attend_current: whether a query also sees the key of its own position, s ≤ t.
    mask: key mask `[B, 1, 1, T]`. A masked key takes no weight.
    is_causal: must be True, because keys are ordered from a query to the left.
    query_segment_ids: `[B, T]`; keys of another segment take no weight.
    block_size: C, the number of queries and of keys in a tile; None means at most
      `BLOCK` on a CPU, and the choice of `backend` elsewhere. It affects only rounding.
    scale: factor of the logits; None means 1/√H.
    key_segment_ids: `[B, T]`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; zeros for a query that sees no key, such as
    the first query without `attend_current`.

  Raises:
    ValueError: the mask varies along queries, or `is_causal` is False.

  Cost: time ½·T²·N·(H+V+C); memory B·N·C² and T·N·V, with gradients also T·N for one
  block of queries at a time.

  Differs from the paper in masks, segments and `attend_current`, which its code has.
  The remaining weight is 1 minus the output for values of 1.

  Paper: Scaling stick-breaking attention, arXiv:2410.17980, equations 1 and 2.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; keys take weight from a query to the "
      "left; use dense attention in both directions"
    )
  keep = checks.key_mask(mask, query, key)
  length = query.shape[1]
  size = min(block_size or _block(query), length)
  scale = checks.softmax_scale(scale, query.shape[3])

  def to_blocks(x):
    return jnp.moveaxis(split_blocks(zero_masked(x, keep), size), 3, 2)

  key_ids = keep, key_segment_ids
  keys = to_blocks(key), to_blocks(value), *split_blocks(key_ids, size)
  rows = *split_blocks((query, query_segment_ids), size), keys

  def visit(rows, state, keys, right=None):
    query, query_ids, _ = rows
    key, value, keep, key_ids = keys
    visible = visible_in_tile(size, keep, query_ids, key_ids, right)
    query = jnp.swapaxes(query, 1, 2)
    return _take_weight(query, state, key, value, visible, scale)

  def start(rows):
    query, _, keys = rows
    query = jnp.swapaxes(query, 1, 2)
    return visit(
      rows, _initial_state(query, value), keys, 0 if attend_current else -1
    )

  _, out = scan_leftward(start, visit, rows, keys)
  return join_blocks(out, length).astype(query.dtype)


def _block(query: Array) -> int:
  """The default of C."""
  batch, length, num_heads, _ = query.shape
  # For each pair: a score, its softplus, the sum of later softpluses, and a weight.
  pair_bytes = 4 * 4 * batch * num_heads
  return backend.block(pair_bytes, BLOCK, BLOCK, length, length)[0]


def _initial_state(query: Float[Array, "B N C H"], value: Array) -> Any:
  """The state of queries before their first key."""
  # Not constants, so that they are sharded like the queries.
  total = jnp.zeros_like(query[..., :1], jnp.float32)
  shape = *total.shape[:3], value.shape[-1]
  return total, jnp.zeros_like(total, shape=shape)


def _take_weight(
  query: Float[Array, "B N C H"],
  state: tuple[Float[Array, "B N C 1"], Float[Array, "B N C V"]],
  key: Float[Array, "B K D H"],
  value: Float[Array, "B K D V"],
  visible: Bool[Array, "#B #N #C D"] | None,
  scale: Any,
) -> tuple[Float[Array, "B N C 1"], Float[Array, "B N C V"]]:
  """Adds D keys further left to the state: (−log of the remaining weight, out)."""
  total, out = state
  x = scale * query_dot("bkqh,bkdh->bkqd", query, key)
  if visible is not None:
    x = jnp.where(visible, x, _MASKED)
  # Not −|x|, whose derivative at 0 is −1: softplus(0) and log β have slopes of ½.
  log1p_exp = jnp.log1p(jnp.exp(jnp.minimum(x, -x)))
  softplus = jnp.maximum(x, 0.0) + log1p_exp  # −log(1 − β)
  later = _later_sums(softplus)
  weights = jnp.exp(jnp.minimum(x, 0.0) - log1p_exp - later - total)
  update = query_dot("bkqd,bkdv->bkqv", weights.astype(value.dtype), value)
  return total + jnp.sum(softplus, -1, keepdims=True), out + update


def _later_sums(x: Float[Array, "B N C D"]) -> Float[Array, "B N C D"]:
  """Sums over the keys to the right of each key, without differences of sums."""
  later = jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)
  # XLA:GPU would fold the shift into one window of D positions, which is quadratic.
  later = jax.lax.optimization_barrier(later)
  return jax.lax.cumsum(later, axis=3, reverse=True)


@attention_factory
def stick_breaking(attend_current: bool = False) -> Attention:
  """The mechanism of `stick_breaking_attention`.

  Args:
    attend_current: as in `stick_breaking_attention`.

  Returns:
    A causal `Attention` without variables, that decodes with the cache of
    dense attention.
  """
  exact = dense()

  def decode(variables, cache, query, key, value, *, scale=None):
    del variables
    index, cache = cache.index[:, None], append(cache, key, value)
    positions = jnp.arange(cache.key.shape[1])[None]
    is_visible = positions <= index if attend_current else positions < index
    queries = jnp.swapaxes(query, 1, 2)
    _, out = _take_weight(
      queries,
      _initial_state(queries, value),
      jnp.moveaxis(cache.key, 2, 1),
      jnp.moveaxis(cache.value, 2, 1),
      is_visible[:, None, None],
      checks.softmax_scale(scale, query.shape[3]),
    )
    return jnp.swapaxes(out, 1, 2).astype(query.dtype), cache

  return Attention(
    init=no_variables,
    apply=make_apply(
      "stick_breaking",
      stick_breaking_attention,
      lambda variables: {"attend_current": attend_current},
    ),
    init_cache=exact.init_cache,
    decode=decode,
    prefill=exact.prefill,
    supports=frozenset({"causal", "mask", "segments", "decode"}),
    causal_only=True,
  )
