"""One chunk of causal linear attention, forward and backward.

A chunk's queries read earlier keys from the state (see `linear_state`) and those
of the chunk, s ≤ t, by their scores

  A_ts = Σ_m φ_m(q_t) φ_m(k_s)

Features as logarithms need two more scales, γ_t = max_m ℓ_m(q_t) and
κ_s = max_m ℓ_m(k_s). The largest of the state's, C = max_m c_m, is that κ_s of
earlier keys which is largest, so no term can exceed e^(γ_t + K_t):

  Â_ts = Σ_m e^(ℓ_m(q_t) − γ_t) e^(ℓ_m(k_s) − κ_s)
  Ê_t  = Σ_m e^(ℓ_m(q_t) − γ_t) e^(c_m − C) Z_m
  K_t  = max(C, max_{s ≤ t in the chunk} κ_s)
  n_t  = e^(C − K_t) Ê_t + Σ_{s ≤ t} e^(κ_s − K_t) Â_ts    up to e^(γ_t + K_t)

Far apart. γ + K is a bound only: where queries and keys have their largest
features in different places, Â and Ê underflow. What is lost of a term is below
float32's smallest number, so it matters only where n_t itself is as small. Those
rows (n_t < 1e-24) are found, and only where there are some, a loop over the rows
of the chunk replaces them by what the state gives up to e^b_t and by

  log A_ts = log Σ_m e^(ℓ_m(q_t) + ℓ_m(k_s)),

C·M exponentials a row instead of C + M. It is a loop of many or of no rounds
and no `cond`, of which `vmap` would compute both sides. A row is replaced or
not for what it sees, so the future changes no bit of it.

Backward, scores are held transposed, [keys, queries], for the fast products.
"""

import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import linear_state
from attention.blocks import dot, turned
from attention.linear_blocks import KeyBlock
from attention.linear_state import LinearState

_LOST = 1e-24
"""A normaliser up to e^(γ + K) below it may lack terms that float32 cannot hold."""


class Chunk(NamedTuple):
  """One chunk as the products want it; `seen`: s ≤ t and s counts."""

  start: Int[Array, ""]
  query: Float[Array, "A Q H"]
  keys: KeyBlock
  seen: Bool[Array, "E Q C"]


class Gradients(NamedTuple):
  """Of the features and values of a chunk."""

  query: Float[Array, "A Q M"]
  key: Float[Array, "A C M"]
  value: Float[Array, "A C V"]


def read(
  state: LinearState,
  query_features: Float[Array, "A Q M"],
  key_features: Float[Array, "A C M"],
  chunk: Chunk,
) -> tuple[Float[Array, "A Q X"], Float[Array, "A Q 1"] | None]:
  """Numerator and normaliser of both parts up to e^β, and β = γ + K."""
  seen, values = chunk.seen, linear_state.with_ones(chunk.keys.value)
  if state.log_scale is None:
    sums, _ = linear_state.read(state, query_features)
    scores = dot("aqm,acm->aqc", query_features, key_features)
    weights = jnp.where(seen, scores, 0.0)
    return sums + dot("aqc,acv->aqv", weights, values), None

  query_terms, query_scale = _scaled(query_features)
  key_terms, key_scale = _scaled(key_features)
  key_scale = jnp.swapaxes(key_scale, 1, 2)
  state_scale = jnp.max(state.log_scale, axis=-1, keepdims=True)
  state_sums = state.sums * jnp.exp(state.log_scale - state_scale)
  highest = jnp.max(
    jnp.where(seen, key_scale, -jnp.inf), axis=-1, keepdims=True
  )
  highest = jnp.maximum(highest, state_scale)
  scores = dot("aqm,acm->aqc", query_terms, key_terms)
  weights = jnp.where(seen, scores * jnp.exp(key_scale - highest), 0.0)
  sums = dot("aqm,avm->aqv", query_terms, state_sums)
  sums *= jnp.exp(state_scale - highest)
  total = jnp.sum(weights, axis=-1, keepdims=True) + sums[..., -1:]
  lost = (total <= _LOST) & linear_state.has_seen(highest)

  def exactly(t, carry):
    log_scores = _log_scores(query_features, key_features, t)
    log_scores = jnp.where(_row(seen, t), log_scores, -jnp.inf)
    earlier, scale = linear_state.read(state, _row(query_features, t))
    scale = cast(Array, scale)
    exact_scale = jnp.maximum(
      scale, jnp.max(log_scores, axis=-1, keepdims=True)
    )
    exact = (
      jnp.exp(log_scores - exact_scale),
      earlier * jnp.exp(scale - exact_scale),
      exact_scale,
    )
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(
        x, jnp.where(_row(lost, t), new, _row(x, t)), t, axis=1
      )
      for x, new in zip(carry, exact, strict=True)
    )

  rounds = jnp.where(jnp.any(lost), lost.shape[1], 0)
  weights, sums, scale = jax.lax.fori_loop(
    0, rounds, exactly, (weights, sums, query_scale + highest)
  )
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
  scale = jnp.max(terms, axis=-1, keepdims=True)
  total = jnp.sum(jnp.exp(terms - scale), axis=-1)
  return (jnp.log(total) + scale[..., 0])[:, None]


def pull(
  gradients: Gradients,
  is_log: bool,
  query_features: Float[Array, "A Q M"],
  key_features: Float[Array, "A C M"],
  chunk: Chunk,
  g: Float[Array, "A Q X"],
  n: Float[Array, "A Q 1"],
) -> Gradients:
  """Adds to `gradients` what goes through the weights of one chunk."""
  seen = jnp.swapaxes(chunk.seen, 1, 2)
  n = jnp.swapaxes(n, 1, 2)
  d_weights = dot("acv,aqv->acq", linear_state.with_ones(chunk.keys.value), g)
  if not is_log:
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
  d_query = dot("aqc,acm->aqm", turned(d_scores), key_terms)
  if is_log:
    d_query, d_key = query_terms * d_query, key_terms * d_key
  d_query, d_key = gradients.query + d_query, gradients.key + d_key
  if lost is not None:
    d_query, d_key, weights = _pull_exactly(
      (d_query, d_key, weights),
      query_features,
      key_features,
      jnp.swapaxes(chunk.seen, 1, 2) & lost,
      d_weights,
      n,
    )
  d_value = gradients.value + dot("acq,aqv->acv", weights, g[..., :-1])
  return Gradients(d_query, d_key, d_value)


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
