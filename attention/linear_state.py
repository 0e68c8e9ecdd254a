"""The running state behind `linear_attention` and `performer_attention`.

With features φ(x) of queries and keys, M of them, all ≥ 0,

  out_t = Σ_m φ_m(q_t) U_m / Σ_m φ_m(q_t) Z_m,
  U_m = Σ_s φ_m(k_s) v_s,  Z_m = Σ_s φ_m(k_s)

Values carry a column of ones, so that Z is one more row of the sums and the
normaliser one more column of what a query reads.

Features as they are. A map that stays in float32's range (elu + 1, ReLU, …) is
summed as it is. A normaliser under 1e-30 counts as having seen nothing.

Features as logarithms, without a leak. Performer's features overflow, so they
come as ℓ_m(x) = log φ_m(x). The paper's code divides by one maximum over all
keys and adds an epsilon; in the causal form both let a future key change the
past. Here the state of every feature carries a log-scale c_m = max_s ℓ_m(k_s)
over the keys *seen so far* and is rescaled when it grows, as in online softmax:

  c'_m = max(c_m, max_s ℓ_m(k_s))
  U'_m = e^(c_m − c'_m) U_m + Σ_s e^(ℓ_m(k_s) − c'_m) v_s      (Z alike)

A query reads with b_t = max_m (ℓ_m(q_t) + c_m), so that the largest term of its
normaliser is at least 1; c and b cancel in the ratio, which therefore needs no
epsilon and no gradient through either.

Backward. n_t is the normaliser, as its logarithm where features are. With

  r_tm = φ_m(q_t) e^c_m / n_t,   g_t the cotangent of out_t,   δ_t = −g_t·out_t

the sums U, Z get Σ_t r_tm (g_t, δ_t), and log φ_m(q_t) gets
r_tm (U_m·g_t + Z_m δ_t): no maximum is looked for again, nothing but n is kept.

Axes: A = B·K products side by side; the J = N/K query heads of a key head are
Q = J·C rows of one product. Sums are [X, M] with X = V+1, not [M, X], and values
are turned where they are read, because then every product has one of the two
forms that XLA:CPU sends to its fast kernel, 'nqd,nkd->nqk' and 'nqk,nkd->nqd'.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.blocks import dot, largest, turned

_EMPTY = -1e30
"""Log-scale of a state that has seen nothing: finite, so that differences are
numbers, and so low that e^(_EMPTY - anything real) is 0."""

_NOTHING = 1e-30
"""Normalisers below it are 0, or 1/n would overflow in the backward pass."""


class LinearState(NamedTuple):
  """What all keys seen so far leave behind; also the decode cache.

  In a cache the leading axis A is two, B and K.

  Attributes:
    log_scale: c, the largest log-feature seen; None where features are no
      logarithms.
    sums: U and below it Z, X = V+1 rows.
  """

  log_scale: Float[Array, "*A 1 M"] | None
  sums: Float[Array, "*A X M"]


def empty_state(
  shape: tuple[int, ...], num_features: int, value_dim: int, is_log: bool
) -> LinearState:
  """The state that has seen nothing, with leading axes `shape`."""
  log_scale = None
  if is_log:
    log_scale = jnp.full((*shape, 1, num_features), _EMPTY, jnp.float32)
  sums = jnp.zeros((*shape, value_dim + 1, num_features), jnp.float32)
  return LinearState(log_scale, sums)


def has_seen(log_scale: Float[Array, "..."]) -> Bool[Array, "..."]:
  """Whether a log-scale is that of some key."""
  return log_scale > 0.5 * _EMPTY


def with_ones(value: Float[Array, "A C V"]) -> Float[Array, "A C X"]:
  """Values with the column that sums to the normaliser."""
  return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def grown_scale(
  log_scale: Float[Array, "A 1 M"] | None,
  features: Float[Array, "A C M"],
  keep: Bool[Array, "A C 1"] | None,
) -> Float[Array, "A 1 M"] | None:
  """The c' after C more keys."""
  if log_scale is None:
    return None
  if keep is not None:
    features = jnp.where(keep, features, _EMPTY)
  return jnp.maximum(log_scale, largest(features, 1))


def key_terms(
  log_scale: Float[Array, "A 1 M"] | None,
  features: Float[Array, "A C M"],
  keep: Bool[Array, "A C 1"] | None,
) -> Float[Array, "A C M"]:
  """φ(k) e^(−c); 0 for keys that do not count."""
  terms = features if log_scale is None else jnp.exp(features - log_scale)
  return terms if keep is None else jnp.where(keep, terms, 0.0)


def absorb(
  state: LinearState,
  features: Float[Array, "A C M"],
  value: Float[Array, "A C V"],
  keep: Bool[Array, "A C 1"] | None,
) -> LinearState:
  """Adds C keys to the state."""
  log_scale = grown_scale(state.log_scale, features, keep)
  terms = key_terms(log_scale, features, keep)
  sums = state.sums
  if state.log_scale is not None and log_scale is not None:
    sums *= jnp.exp(state.log_scale - log_scale)
  sums += dot("avc,acm->avm", turned(with_ones(value)), terms)
  return LinearState(log_scale, sums)


def read(
  state: LinearState, features: Float[Array, "A Q M"]
) -> tuple[Float[Array, "A Q X"], Float[Array, "A Q 1"] | None]:
  """Numerator and normaliser, both up to e^b, and b."""
  if state.log_scale is None:
    return dot("aqm,avm->aqv", features, state.sums), None
  terms = features + state.log_scale
  scale = jnp.max(terms, axis=-1, keepdims=True)
  return dot("aqm,avm->aqv", jnp.exp(terms - scale), state.sums), scale


def finish(
  sums: Float[Array, "A Q X"], scale: Float[Array, "A Q 1"] | None
) -> tuple[Float[Array, "A Q V"], Float[Array, "A Q 1"]]:
  """Numerator / normaliser, and n; 0 and ∞ where a query saw nothing."""
  total = sums[..., -1:]
  nothing = jnp.abs(total) <= _NOTHING  # False for nan, which must show.
  total = jnp.where(nothing, 1.0, total)
  out = jnp.where(nothing, 0.0, sums[..., :-1] / total)
  norm = total if scale is None else scale + jnp.log(total)
  return out, jnp.where(nothing, jnp.inf, norm)


def read_again(
  state: LinearState,
  features: Float[Array, "A Q M"],
  norm: Float[Array, "A Q 1"],
) -> Float[Array, "A Q M"]:
  """The normalised terms r, from the n of `finish`."""
  if state.log_scale is None:
    return features / norm
  return jnp.exp(features + state.log_scale - norm)
