"""The running state of linear attention: how it grows and how it is read.

With features φ(x) of queries and keys, M of them, all ≥ 0,

  out_t = Σ_m φ_m(q_t) U_m / Σ_m φ_m(q_t) Z_m,
  U_m = Σ_s φ_m(k_s) v_s,  Z_m = Σ_s φ_m(k_s)

Values have a column of ones appended, so that Z is one more row of the sums,
and the normaliser one more column of what a query reads.

Plain features. Features that stay in float32's range (elu + 1, ReLU, …) are
summed directly. A query whose normaliser is under 1e-30 counts as one that has
seen no key.

Features as logarithms. Performer's features overflow, so they are given as
ℓ_m(x) = log φ_m(x). The paper's code divides by one maximum over all keys and
adds an epsilon. In the causal form, both let a future key change the past. Here
the state of every feature has a log-scale c_m = max_s ℓ_m(k_s) over the keys
*seen so far*, and is rescaled when it grows, as in online softmax:

  c'_m = max(c_m, max_s ℓ_m(k_s))
  U'_m = e^(c_m − c'_m) U_m + Σ_s e^(ℓ_m(k_s) − c'_m) v_s      (Z alike)

A query reads with b_t = max_m (ℓ_m(q_t) + c_m), so that the largest term of its
normaliser is at least 1. c and b cancel in the ratio, which therefore needs no
epsilon, and no gradient through c or b.

Backward. n_t is the normaliser, or its logarithm where features are logarithms.
With

  r_tm = φ_m(q_t) e^c_m / n_t,   g_t the cotangent of out_t,   δ_t = −g_t·out_t

the gradient of the sums U, Z is Σ_t r_tm (g_t, δ_t), and that of log φ_m(q_t)
is r_tm (U_m·g_t + Z_m δ_t). The backward reads n and computes no maximum again.

Many chunks at once. U' = e^(c − c') U + P is a linear recurrence along chunks,
so the states before G chunks follow from their P by an associative scan, and
the gradients of these states by the same scan in reverse.

Axes. The leading axes *A are B and K, and G where a block is cut into chunks;
the J = N/K query heads of a key head are Q = J·C rows of one product. Sums are
[X, M] with X = V+1, because every product then has a form for which XLA:CPU has
a fast kernel (`core.layout`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core.layout import dot, turned

EMPTY = -1e30
"""Log-scale of a state before the first key. It is finite, so that differences
are numbers, and so low that e^(EMPTY − x) is 0 for every x that occurs."""

_NOTHING = 1e-30
"""Lower normalisers count as 0: their 1/n would overflow in the backward."""

_CHUNKS = 2
"""The axis of chunks in `[B, K, G, …]`."""


class LinearState(NamedTuple):
  """The sums over all keys seen so far; also the decode cache.

  Attributes:
    log_scale: c, the largest log-feature seen; None where features are not
      logarithms.
    sums: U and below it Z, X = V+1 rows.
  """

  log_scale: Float[Array, "*A 1 M"] | None
  sums: Float[Array, "*A X M"]


class ChunkStates(NamedTuple):
  """The state along the G chunks of a block.

  Attributes:
    before: the state before every chunk, which its queries read.
    after: the state after the last chunk.
    decay: e^(c − c') of every chunk; None where features are not logarithms.
    terms: φ(k) e^(−c') of every key.
  """

  before: LinearState
  after: LinearState
  decay: Float[Array, "B K G 1 M"] | None
  terms: Float[Array, "B K G C M"]


def empty(
  batch: int, kv_heads: int, num_features: int, value_dim: int, is_log: bool
) -> LinearState:
  """The state before the first key."""
  log_scale = None
  if is_log:
    shape = (batch, kv_heads, 1, num_features)
    log_scale = jnp.full(shape, EMPTY, jnp.float32)
  sums = (batch, kv_heads, value_dim + 1, num_features)
  return LinearState(log_scale, jnp.zeros(sums, jnp.float32))


def has_seen(log_scale: Float[Array, "..."]) -> Bool[Array, "..."]:
  """Whether a log-scale comes from a key, and is not that of `empty`."""
  return log_scale > 0.5 * EMPTY


def with_ones(value: Float[Array, "*A C V"]) -> Float[Array, "*A C X"]:
  """Values with the column of ones, whose weighted sum is the normaliser."""
  values = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
  return values


def largest(
  features: Float[Array, "*A C M"], keep: Bool[Array, "*#A C 1"] | None
) -> Float[Array, "*A 1 M"]:
  """max_s ℓ_m(k_s) over the keys that count."""
  if keep is not None:
    features = jnp.where(keep, features, EMPTY)
  return jnp.max(features, axis=-2, keepdims=True)


def key_terms(
  log_scale: Float[Array, "*A 1 M"] | None,
  features: Float[Array, "*A C M"],
  keep: Bool[Array, "*#A C 1"] | None,
) -> Float[Array, "*A C M"]:
  """φ(k) e^(−c); 0 for keys that do not count."""
  terms = features if log_scale is None else jnp.exp(features - log_scale)
  return terms if keep is None else jnp.where(keep, terms, 0.0)


def update(
  state: LinearState,
  features: Float[Array, "B K C M"],
  value: Float[Array, "B K C V"],
  keep: Bool[Array, "#B 1 C 1"] | None,
) -> LinearState:
  """The state after C more keys."""
  before, sums = state
  log_scale = None
  if before is not None:
    log_scale = jnp.maximum(before, largest(features, keep))
    sums = sums * jnp.exp(before - log_scale)
  terms = key_terms(log_scale, features, keep)
  sums += dot("...vc,...cm->...vm", turned(with_ones(value)), terms)
  return LinearState(log_scale, sums)


def update_by_chunk(
  state: LinearState,
  features: Float[Array, "B K G C M"],
  value: Float[Array, "B K G C V"],
  keep: Bool[Array, "#B 1 G C 1"] | None,
) -> ChunkStates:
  """The states along G chunks of keys, computed at the same time."""
  first, _ = state
  scales = before = decay = None
  if first is not None:
    scales = largest(features, keep)
    scales = _replaced(scales, 0, jnp.maximum(first, _at(scales, 0)))
    scales = jax.lax.associative_scan(jnp.maximum, scales, axis=_CHUNKS)
    before = _shifted(scales, first)
    decay = jnp.exp(before - scales)
  terms = key_terms(scales, features, keep)
  # Not turned as in `update`: XLA:CPU would join the turn of so small a block
  # with the cut out of the whole array, and read that with a stride.
  sums = dot("...cv,...cm->...vm", with_ones(value), terms)
  sums, last = recurrence(state.sums, decay, sums)
  after = None if scales is None else _at(scales, -1)
  return ChunkStates(
    LinearState(before, sums), LinearState(after, last), decay, terms
  )


def recurrence(
  first: Float[Array, "B K X M"],
  decay: Float[Array, "B K G 1 M"] | None,
  terms: Float[Array, "B K G X M"],
  reverse: bool = False,
) -> tuple[Float[Array, "B K G X M"], Float[Array, "B K X M"]]:
  """Runs x ← decay_g · x + terms_g over the chunks, from x = `first`.

  Where `decay` is None, it is 1. `reverse` starts at the last chunk.

  Returns:
    x before every chunk, and x after all of them.
  """
  start, end = (-1, 0) if reverse else (0, -1)
  carried = first if decay is None else _at(decay, start) * first
  terms = _replaced(terms, start, _at(terms, start) + carried)
  if decay is None:
    scanned = jax.lax.associative_scan(
      jnp.add, terms, reverse=reverse, axis=_CHUNKS
    )
  else:
    _, scanned = jax.lax.associative_scan(
      _in_turn, (decay, terms), reverse=reverse, axis=_CHUNKS
    )
  return _shifted(scanned, first, reverse), _at(scanned, end)


def _in_turn(earlier, later):
  """Two steps x ← a x + b as one: first the earlier, then the later."""
  return later[0] * earlier[0], later[0] * earlier[1] + later[1]


def _at(x, g):
  return jax.lax.index_in_dim(x, g, _CHUNKS, keepdims=False)


def _replaced(x, g, new):
  new = jnp.expand_dims(new, _CHUNKS)
  if x.shape[_CHUNKS] == 1:
    return new
  rest = (x[:, :, :-1], new) if g == -1 else (new, x[:, :, 1:])
  return jnp.concatenate(rest, axis=_CHUNKS)


def _shifted(x, first, reverse=False):
  """`x` one chunk later (earlier in reverse), with `first` at the free end."""
  first = jnp.expand_dims(first, _CHUNKS)
  parts = (x[:, :, 1:], first) if reverse else (first, x[:, :, :-1])
  return jnp.concatenate(parts, axis=_CHUNKS)


def read_out(
  state: LinearState, features: Float[Array, "*A Q M"]
) -> tuple[Float[Array, "*A Q X"], Float[Array, "*A Q 1"] | None]:
  """Numerator and normaliser, both up to a factor e^b, and b."""
  if state.log_scale is None:
    return dot("...qm,...vm->...qv", features, state.sums), None
  terms = features + state.log_scale
  scale = jnp.max(terms, axis=-1, keepdims=True)
  terms = jnp.exp(terms - scale)
  return dot("...qm,...vm->...qv", terms, state.sums), scale


def normalised(
  sums: Float[Array, "*A Q X"], scale: Float[Array, "*A Q 1"] | None
) -> tuple[Float[Array, "*A Q V"], Float[Array, "*A Q 1"]]:
  """Numerator / normaliser, and n; 0 and ∞ where a query saw no key."""
  total = sums[..., -1:]
  nothing = jnp.abs(total) <= _NOTHING  # False for nan, which must show.
  total = jnp.where(nothing, 1.0, total)
  out = jnp.where(nothing, 0.0, sums[..., :-1] / total)
  norm = total if scale is None else scale + jnp.log(total)
  return out, jnp.where(nothing, jnp.inf, norm)


def read_out_gradients(
  state: LinearState,
  features: Float[Array, "*A Q M"],
  norm: Float[Array, "*A Q 1"],
  g: Float[Array, "*A Q X"],
) -> tuple[Float[Array, "*A Q M"], Float[Array, "*A X M"]]:
  """Gradients of features and sums through `read_out` and `normalised`.

  Args:
    state: what was read.
    features: of the queries.
    norm: n.
    g: (g, δ), the cotangents of numerator and normaliser times n.

  Returns:
    Gradients of the features and of the sums.
  """
  d_terms = dot("...qv,...vm->...qm", g, state.sums)
  if state.log_scale is None:
    terms, d_features = features / norm, d_terms / norm
  else:
    terms = jnp.exp(features + state.log_scale - norm)
    d_features = terms * d_terms
  return d_features, dot("...vq,...qm->...vm", turned(g), terms)


def update_gradients(
  terms: Float[Array, "*A C M"],
  value: Float[Array, "*A C V"],
  keep: Bool[Array, "*#A C 1"] | None,
  d_sums: Float[Array, "*A X M"],
  is_log: bool,
) -> tuple[Float[Array, "*A C M"], Float[Array, "*A C V"]]:
  """Gradients of features and values through `update`, from `d_sums`."""
  d_features = dot("...cv,...vm->...cm", with_ones(value), d_sums)
  if is_log:
    d_features *= terms
  elif keep is not None:
    d_features = jnp.where(keep, d_features, 0.0)
  return d_features, dot("...cm,...vm->...cv", terms, d_sums[..., :-1, :])
