"""The causal loop behind linear attention, with its own backward.

Chunk i holds the queries from i·C on and the keys of the same positions. Keys
of earlier chunks are read from the state (`linear_state`, terms up to e^b);
inside a chunk, where s ≤ t, the weights are the scores themselves:

  A_ts = Σ_m φ_m(q_t) φ_m(k_s)

Features as logarithms need two more scales, γ_t = max_m ℓ_m(q_t) and
κ_s = max_m ℓ_m(k_s), and both parts meet at β_t, which no term can exceed:

  A_ts = Σ_m e^(ℓ_m(q_t) − γ_t) e^(ℓ_m(k_s) − κ_s)
  β_t  = max(b_t, γ_t + max_{s ≤ t} κ_s)
  n_t  = Σ_m e^(ℓ_m(q_t) + c_m − β_t) Z_m + Σ_{s ≤ t} A_ts e^(γ_t + κ_s − β_t)

Nothing at t reads a key after t.

Far apart. β is a bound only: where queries and keys have their largest features
in different places, A underflows. What is lost is below float32's smallest
number a term, so it matters only where n_t itself is as small. Those rows
(n_t < 1e-24) are found, and only where there are some, a loop over the rows of
the chunk replaces them by

  log A_ts = log Σ_m e^(ℓ_m(q_t) + ℓ_m(k_s)),

C·M exponentials a row instead of C + M. It is a loop of C or of no rounds and
no `cond`, of which `vmap` would compute both sides.

Backward, chunks in reverse, from the state before each, kept by the forward
pass: C/T of (V+1)·M numbers a position. With P_ts = A_ts e^(γ_t + κ_s) / n_t
and (g, δ) as in `linear_state`, log A_ts gets P_ts (g_t·v_s + δ_t), so
log φ_m(q_t) gets r_tm (U_m·g_t + Z_m δ_t) and, of the chunk,
Σ_s P_ts (g_t·v_s + δ_t) φ_m(q_t) φ_m(k_s) / A_ts, where A_ts cancels. Scores
are held transposed, [keys, queries], for the fast products.
"""

from functools import partial
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import linear_state
from attention.linear_blocks import (
  FeatureMap,
  KeyBlock,
  Operands,
  add_keys,
  add_rows,
  cut,
  cut_cotangent,
  cut_keys,
  features_of,
  from_rows,
  sizes,
  to_rows,
  told,
  write,
)
from attention.linear_state import LinearState, dot

_LOST = 1e-24
"""A normaliser up to e^β below it may lack terms that float32 cannot hold."""


class _Chunk(NamedTuple):
  """One chunk as the products want it; `seen`: s ≤ t and s counts."""

  start: Int[Array, ""]
  query: Float[Array, "A Q H"]
  keys: KeyBlock
  seen: Bool[Array, "E Q C"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal(
  features: FeatureMap, operands: Operands, keep: Bool[Array, "B S"] | None
) -> Float[Array, "B T N V"]:
  """Linear attention of query t to the keys s ≤ t; `keep`: which count."""
  return _forward(features, operands, keep, save=False)[0]


def _cut_chunk(operands, keep, first):
  """The chunk from `first` on; of earlier positions only queries, again."""
  query, key = operands.query, operands.key
  length, (source_length, num_kv_heads) = query.shape[1], key.shape[1:3]
  size, _ = sizes(length)
  start = jnp.minimum(first, length - size)
  rows = to_rows(cut(query, start, size), num_kv_heads)
  # A last chunk may reach past the last query: no row sees those keys.
  is_whole = source_length >= length and length % size == 0
  keys = cut_keys(operands, keep, first, min(size, source_length), is_whole)
  position = start + jnp.arange(rows.shape[1]) % size
  source = keys.start + jnp.arange(keys.key.shape[1])
  seen = (source[None, :] <= position[:, None])[None]
  if keys.keep is not None:
    seen &= jnp.swapaxes(keys.keep, 1, 2)
  return _Chunk(start, rows, keys, seen)


def _empty(features, operands):
  batch, _, num_kv_heads, _ = operands.key.shape
  return linear_state.empty_state(
    (batch * num_kv_heads,),
    features.size,
    operands.value.shape[-1],
    features.is_log,
  )


def _forward(features, operands, keep, save):
  """The result, n `[B, T, N, 1]` and, to `save`, the state of every chunk."""
  query, _, value, constants = operands
  batch, length, num_heads, _ = query.shape
  size, num_chunks = sizes(length)

  def step(i, carry):
    state, out, norm, saved = carry
    if save:
      saved = jax.tree.map(lambda xs, x: xs.at[i].set(x), saved, state)
    chunk = _cut_chunk(operands, keep, i * size)
    query_features, key_features = (
      features_of(features, x, constants) for x in (chunk.query, chunk.keys.key)
    )
    results = linear_state.finish(
      *_read_causally(state, query_features, key_features, chunk)
    )
    results = [from_rows(x, batch, num_heads) for x in results]
    if length % size:
      # Rows of the chunk before are there already; the state is past them.
      is_new = chunk.start + jnp.arange(size) >= i * size
      results = [
        jnp.where(is_new[None, :, None, None], x, cut(whole, chunk.start, size))
        for x, whole in zip(results, (out, norm), strict=True)
      ]
    out, norm = (
      write(whole, x, chunk.start)
      for x, whole in zip(results, (out, norm), strict=True)
    )
    state = linear_state.absorb(
      state, key_features, chunk.keys.value, chunk.keys.keep
    )
    return state, out, norm, saved

  state = _empty(features, operands)
  saved = None
  if save:
    saved = jax.tree.map(
      lambda x: jnp.zeros((num_chunks, *x.shape), x.dtype), state
    )
  out = jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype)
  norm = jnp.zeros((*query.shape[:3], 1), jnp.float32)
  _, out, norm, saved = jax.lax.fori_loop(
    0, num_chunks, step, (state, out, norm, saved)
  )
  return out, norm, saved


def _read_causally(
  state: LinearState,
  query_features: Float[Array, "A Q M"],
  key_features: Float[Array, "A C M"],
  chunk: _Chunk,
) -> tuple[Float[Array, "A Q X"], Float[Array, "A Q 1"] | None]:
  """Numerator and normaliser of both parts, up to e^β, and β."""
  seen, values = chunk.seen, linear_state.with_ones(chunk.keys.value)
  sums, earlier_scale = linear_state.read(state, query_features)
  if earlier_scale is None:
    scores = dot("aqm,acm->aqc", query_features, key_features)
    weights = jnp.where(seen, scores, 0.0)
    return sums + dot("aqc,acv->aqv", weights, values), None

  query_terms, query_scale = _scaled(query_features)
  key_terms, key_scale = _scaled(key_features)
  log_bounds = jnp.where(
    seen, query_scale + jnp.swapaxes(key_scale, 1, 2), -jnp.inf
  )
  scale = jnp.maximum(
    earlier_scale, jnp.max(log_bounds, axis=-1, keepdims=True)
  )
  scores = dot("aqm,acm->aqc", query_terms, key_terms)
  weights = jnp.where(seen, scores * jnp.exp(log_bounds - scale), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  total += sums[..., -1:] * jnp.exp(earlier_scale - scale)
  lost = (total <= _LOST) & jnp.any(seen, axis=-1, keepdims=True)

  def exactly(t, carry):
    log_scores = _log_scores(query_features, key_features, t)
    log_scores = jnp.where(_row(seen, t), log_scores, -jnp.inf)
    exact_scale = jnp.maximum(
      _row(earlier_scale, t), jnp.max(log_scores, axis=-1, keepdims=True)
    )
    exact = jnp.exp(log_scores - exact_scale), exact_scale
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(
        x, jnp.where(_row(lost, t), new, _row(x, t)), t, axis=1
      )
      for x, new in zip(carry, exact, strict=True)
    )

  rounds = jnp.where(jnp.any(lost), lost.shape[1], 0)
  weights, scale = jax.lax.fori_loop(0, rounds, exactly, (weights, scale))
  sums *= jnp.exp(earlier_scale - scale)
  return sums + dot("aqc,acv->aqv", weights, values), scale


def _scaled(
  log_features: Float[Array, "A C M"],
) -> tuple[Float[Array, "A C M"], Float[Array, "A C 1"]]:
  """Features up to their largest, and the logarithm of that."""
  scale = jnp.max(log_features, axis=-1, keepdims=True)
  return jnp.exp(log_features - scale), scale


def _row(x: Array, t: Array) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1)


def _log_scores(
  query_features: Float[Array, "A Q M"],
  key_features: Float[Array, "A C M"],
  t: Array,
) -> Float[Array, "A 1 C"]:
  """The log A_ts of one query and all keys of its chunk."""
  terms = _row(query_features, t) + key_features
  return jax.nn.logsumexp(terms, axis=-1)[:, None]


def _causal_fwd(features, operands, keep):
  out, norm, saved = _forward(features, operands, keep, save=True)
  return out, (operands, keep, out, norm, saved)


def _causal_bwd(features, residuals, cotangent):
  operands, keep, out, norm, saved = residuals
  query, key, value, constants = operands
  batch, length, num_heads, _ = query.shape
  num_kv_heads = key.shape[2]
  size, num_chunks = sizes(length)
  to_features = partial(features_of, features)

  def step(i, carry):
    d_query, d_key, d_value, d_constants, d_sums = carry
    i = num_chunks - 1 - i
    state = jax.tree.map(lambda xs: xs[i], saved)
    chunk = _cut_chunk(operands, keep, i * size)
    keys = chunk.keys
    g, n = cut_cotangent(cotangent, out, norm, i * size, size, num_kv_heads)
    query_features, query_pullback = jax.vjp(
      to_features, chunk.query, constants
    )
    key_features, key_pullback = jax.vjp(to_features, keys.key, constants)

    # Earlier keys, through the state before this chunk.
    terms = linear_state.read_again(state, query_features, n)
    d_query_features = dot("aqv,avm->aqm", g, state.sums)
    d_query_features = (
      terms * d_query_features if features.is_log else d_query_features / n
    )
    # Later queries, through the state after it.
    log_scale = linear_state.grown_scale(
      state.log_scale, key_features, keys.keep
    )
    key_terms = linear_state.key_terms(log_scale, key_features, keys.keep)
    d_key_features, d_value_rows = told(features, key_terms, keys, d_sums)
    if log_scale is not None:
      d_sums *= jnp.exp(state.log_scale - log_scale)
    d_sums += dot("avq,aqm->avm", linear_state.turned(g), terms)

    inside = _pull_inside(features, query_features, key_features, chunk, g, n)
    d_query_rows, more = query_pullback(d_query_features + inside[0])
    d_key_rows, and_more = key_pullback(d_key_features + inside[1])
    d_query_rows = from_rows(d_query_rows, batch, num_heads)
    return (
      add_rows(d_query, d_query_rows, chunk.start, size),
      *add_keys(d_key, d_value, d_key_rows, d_value_rows + inside[2], keys),
      jax.tree.map(lambda *xs: sum(xs), d_constants, more, and_more),
      d_sums,
    )

  zeros = jax.tree.map(
    jnp.zeros_like,
    (query, key, value, constants, _empty(features, operands).sums),
  )
  gradients = jax.lax.fori_loop(0, num_chunks, step, zeros)
  return Operands(*gradients[:-1]), None


causal.defvjp(_causal_fwd, _causal_bwd)


def _pull_inside(
  features: FeatureMap,
  query_features: Float[Array, "A Q M"],
  key_features: Float[Array, "A C M"],
  chunk: _Chunk,
  g: Float[Array, "A Q X"],
  n: Float[Array, "A Q 1"],
) -> tuple[Float[Array, "A Q M"], Float[Array, "A C M"], Float[Array, "A C V"]]:
  """Gradients of features and values through the weights of one chunk."""
  seen = jnp.swapaxes(chunk.seen, 1, 2)
  n = jnp.swapaxes(n, 1, 2)
  d_weights = dot("acv,aqv->acq", linear_state.with_ones(chunk.keys.value), g)
  if not features.is_log:
    query_terms, key_terms, factors = query_features, key_features, 1.0 / n
    lost = None
  else:
    query_terms, query_scale = _scaled(query_features)
    key_terms, key_scale = _scaled(key_features)
    log_factors = jnp.swapaxes(query_scale, 1, 2) + key_scale - n
    far = seen & (log_factors > -math.log(_LOST))
    lost = jnp.any(far, axis=1, keepdims=True)
    seen &= ~lost
    factors = jnp.exp(log_factors)
  factors = jnp.where(seen, factors, 0.0)
  scores = dot("acm,aqm->acq", key_terms, query_terms)
  weights = scores * factors
  d_scores = d_weights * factors
  d_key = dot("acq,aqm->acm", d_scores, query_terms)
  d_query = dot("aqc,acm->aqm", linear_state.turned(d_scores), key_terms)
  if lost is None:
    return d_query, d_key, dot("acq,aqv->acv", weights, g[..., :-1])
  d_query, d_key, weights = _pull_exactly(
    (query_terms * d_query, key_terms * d_key, weights),
    query_features,
    key_features,
    jnp.swapaxes(chunk.seen, 1, 2) & lost,
    d_weights,
    n,
  )
  return d_query, d_key, dot("acq,aqv->acv", weights, g[..., :-1])


def _pull_exactly(carry, query_features, key_features, seen, d_weights, n):
  """Adds the rows of `seen`, whose scores are out of range, one by one."""

  def column(x, t):
    return jnp.swapaxes(jax.lax.dynamic_slice_in_dim(x, t, 1, axis=2), 1, 2)

  def exactly(t, carry):
    d_query, d_key, weights = carry
    log_scores = _log_scores(query_features, key_features, t)
    weight = jnp.where(column(seen, t), jnp.exp(log_scores - column(n, t)), 0.0)
    d_log = jnp.swapaxes(weight * column(d_weights, t), 1, 2)
    terms = _row(query_features, t) + key_features
    d_terms = d_log * jnp.exp(terms - jnp.swapaxes(log_scores, 1, 2))
    row = _row(d_query, t) + jnp.sum(d_terms, axis=1, keepdims=True)
    weight = jnp.swapaxes(weight, 1, 2)
    weight += jax.lax.dynamic_slice_in_dim(weights, t, 1, axis=2)
    return (
      jax.lax.dynamic_update_slice_in_dim(d_query, row, t, axis=1),
      d_key + d_terms,
      jax.lax.dynamic_update_slice_in_dim(weights, weight, t, axis=2),
    )

  rounds = jnp.where(jnp.any(seen), seen.shape[2], 0)
  return jax.lax.fori_loop(0, rounds, exactly, carry)
