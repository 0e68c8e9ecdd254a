"""Attention within the chunks of causal linear attention, with its backward.

The queries of a chunk read earlier keys from the state (see `state`), and the
keys of the chunk, s ≤ t, by their scores

  A_ts = Σ_m φ_m(q_t) φ_m(k_s)

Features as logarithms need two more scales, γ_t = max_m ℓ_m(q_t) and
κ_s = max_m ℓ_m(k_s). The largest log-scale of the state, D = max_m c_m, is the
largest κ_s of earlier keys, so no term can exceed e^(γ_t + K_t):

  Â_ts = Σ_m e^(ℓ_m(q_t) − γ_t) e^(ℓ_m(k_s) − κ_s)
  Ê_t  = Σ_m e^(ℓ_m(q_t) − γ_t) e^(c_m − D) Z_m
  K_t  = max(D, max_{s ≤ t in the chunk} κ_s)
  n_t  = e^(D − K_t) Ê_t + Σ_{s ≤ t} e^(κ_s − K_t) Â_ts    up to e^(γ_t + K_t)

Rows out of range. γ + K is only a bound: where queries and keys have their
largest features in different places, Â and Ê underflow. The lost part of a term
is below float32's smallest number, so it matters only where n_t itself is about
as small. Such rows (n_t < 1e-24) are found, and where a step of the loop has
some, a loop over the rows of its chunks replaces them by the read-out of the
state up to e^b_t and by

  log A_ts = log Σ_m e^(ℓ_m(q_t) + ℓ_m(k_s)),

with C·M exponentials for a row instead of C + M. It is a loop that may have no
rounds, and not a `cond`, because `vmap` computes both sides of a `cond`.
Whether a row is replaced depends only on what it sees, so the future changes no
bit of it.

The functions take features, values and `seen` as `[B, K, G, …]`, G chunks at
once. In the backward, scores are transposed, [keys, queries], for fast
products.
"""

import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core.layout import cut, dot, put, turned
from attention.linear import state
from attention.linear.state import LinearState

_LOST = 1e-24
"""A normaliser, up to e^(γ + K), below this may lack terms out of range."""


class Gradients(NamedTuple):
  """Gradients of the features of queries and keys, and of the values."""

  query: Float[Array, "B K G Q M"]
  key: Float[Array, "B K G C M"]
  value: Float[Array, "B K G C V"]


def read_out(
  before: LinearState,
  query_features: Float[Array, "B K G Q M"],
  key_features: Float[Array, "B K G C M"],
  value: Float[Array, "B K G C V"],
  seen: Bool[Array, "#B 1 #G Q C"],
) -> tuple[Float[Array, "B K G Q X"], Float[Array, "B K G Q 1"] | None]:
  """Numerator and normaliser up to e^β, of state and chunk, and β = γ + K."""
  values = state.with_ones(value)
  if before.log_scale is None:
    sums, _ = state.read_out(before, query_features)
    scores = dot("...qm,...cm->...qc", query_features, key_features)
    weights = jnp.where(seen, scores, 0.0)
    return sums + dot("...qc,...cv->...qv", weights, values), None

  query_terms, query_scale = _scaled(query_features)
  key_terms, key_scale = _scaled(key_features)
  key_scale = jnp.swapaxes(key_scale, -2, -1)
  state_scale = jnp.max(before.log_scale, axis=-1, keepdims=True)
  state_sums = before.sums * jnp.exp(before.log_scale - state_scale)
  highest = jnp.max(
    jnp.where(seen, key_scale, -jnp.inf), axis=-1, keepdims=True
  )
  highest = jnp.maximum(highest, state_scale)
  scores = dot("...qm,...cm->...qc", query_terms, key_terms)
  weights = jnp.where(seen, scores * jnp.exp(key_scale - highest), 0.0)
  sums = dot("...qm,...vm->...qv", query_terms, state_sums)
  sums *= jnp.exp(state_scale - highest)
  total = jnp.sum(weights, axis=-1, keepdims=True) + sums[..., -1:]
  lost = (total <= _LOST) & state.has_seen(highest)

  def exactly(t, carry):
    log_scores = _log_scores(query_features, key_features, t)
    log_scores = jnp.where(_row(seen, t), log_scores, -jnp.inf)
    earlier, scale = state.read_out(before, _row(query_features, t))
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
      put(x, jnp.where(_row(lost, t), new, _row(x, t)), t, axis=-2)
      for x, new in zip(carry, exact, strict=True)
    )

  rounds = jnp.where(jnp.any(lost), lost.shape[-2], 0)
  weights, sums, scale = jax.lax.fori_loop(
    0, rounds, exactly, (weights, sums, query_scale + highest)
  )
  return sums + dot("...qc,...cv->...qv", weights, values), scale


def _scaled(
  log_features: Float[Array, "B K G C M"],
) -> tuple[Float[Array, "B K G C M"], Float[Array, "B K G C 1"]]:
  """Features up to their largest, and the logarithm of that."""
  scale = jnp.max(log_features, axis=-1, keepdims=True)
  return jnp.exp(log_features - scale), scale


def _row(x, t):
  return cut(x, t, 1, axis=-2)


def _column(x, t):
  return jnp.swapaxes(cut(x, t, 1, axis=-1), -2, -1)


def _log_scores(
  query_features: Float[Array, "B K G Q M"],
  key_features: Float[Array, "B K G C M"],
  t: Array,
) -> Float[Array, "B K G 1 C"]:
  """The log A_ts of one query of each chunk and all keys of the chunk."""
  terms = _row(query_features, t) + key_features
  scale = jnp.max(terms, axis=-1, keepdims=True)
  total = jnp.sum(jnp.exp(terms - scale), axis=-1, keepdims=True)
  return jnp.swapaxes(jnp.log(total) + scale, -2, -1)


def gradients(
  query_features: Float[Array, "B K G Q M"],
  key_features: Float[Array, "B K G C M"],
  value: Float[Array, "B K G C V"],
  seen: Bool[Array, "#B 1 #G Q C"],
  g: Float[Array, "B K G Q X"],
  n: Float[Array, "B K G Q 1"],
  is_log: bool,
) -> Gradients:
  """Gradients through the weights of every chunk; g and n as in `state`."""
  visible = seen = jnp.swapaxes(seen, -2, -1)
  n = jnp.swapaxes(n, -2, -1)
  d_weights = dot("...cv,...qv->...cq", state.with_ones(value), g)
  if not is_log:
    query_terms, key_terms, factors = query_features, key_features, 1.0 / n
    lost = None
  else:
    query_terms, query_scale = _scaled(query_features)
    key_terms, key_scale = _scaled(key_features)
    log_factors = jnp.swapaxes(query_scale, -2, -1) + key_scale - n
    far = seen & (log_factors > -math.log(_LOST))
    lost = jnp.any(far, axis=-2, keepdims=True)
    visible = seen & ~lost
    factors = jnp.exp(log_factors)
  factors = jnp.where(visible, factors, 0.0)
  scores = dot("...cm,...qm->...cq", key_terms, query_terms)
  weights = scores * factors
  d_scores = d_weights * factors
  d_key = dot("...cq,...qm->...cm", d_scores, query_terms)
  d_query = dot("...qc,...cm->...qm", turned(d_scores), key_terms)
  if lost is not None:
    d_query, d_key, weights = _exact_rows(
      (query_terms * d_query, key_terms * d_key, weights),
      query_features,
      key_features,
      seen & lost,
      d_weights,
      n,
    )
  d_value = dot("...cq,...qv->...cv", weights, g[..., :-1])
  return Gradients(d_query, d_key, d_value)


def _exact_rows(carry, query_features, key_features, lost, d_weights, n):
  """Adds the rows of `lost`, whose scores are out of range, one by one."""

  def exactly(t, carry):
    d_query, d_key, weights = carry
    log_scores = _log_scores(query_features, key_features, t)
    weight = jnp.where(
      _column(lost, t), jnp.exp(log_scores - _column(n, t)), 0.0
    )
    d_log = jnp.swapaxes(weight * _column(d_weights, t), -2, -1)
    terms = _row(query_features, t) + key_features
    d_terms = d_log * jnp.exp(terms - jnp.swapaxes(log_scores, -2, -1))
    row = _row(d_query, t) + jnp.sum(d_terms, axis=-2, keepdims=True)
    weight = jnp.swapaxes(weight, -2, -1) + cut(weights, t, 1, axis=-1)
    return (
      put(d_query, row, t, axis=-2),
      d_key + d_terms,
      put(weights, weight, t, axis=-1),
    )

  rounds = jnp.where(jnp.any(lost), lost.shape[-1], 0)
  return jax.lax.fori_loop(0, rounds, exactly, carry)
