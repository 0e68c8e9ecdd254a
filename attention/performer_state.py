"""The running state behind `performer_attention`.

With features φ(x) of queries and keys, M of them,

  out_t = Σ_m φ_m(q_t) U_m / Σ_m φ_m(q_t) Z_m,
  U_m = Σ_s φ_m(k_s) v_s,  Z_m = Σ_s φ_m(k_s)

Stability without a leak. The features overflow, so they live as logarithms
ℓ_m(x) = log φ_m(x). The paper's code divides by one maximum over all keys and
adds an epsilon; in the causal form both let a future key change the past. Here
the state of every feature carries a log-scale c_m = max_s ℓ_m(k_s) over the
keys *seen so far* and is rescaled when it grows, as in online softmax:

  c'_m = max(c_m, max_s ℓ_m(k_s))
  U'_m = e^(c_m − c'_m) U_m + Σ_s e^(ℓ_m(k_s) − c'_m) v_s      (Z alike)

A query reads with b_t = max_m (ℓ_m(q_t) + c_m), so that the largest term of its
normaliser is at least 1; c and b cancel in the ratio, which therefore needs no
epsilon and no gradient through either.

The causal form walks chunks of C positions. Keys of earlier chunks are read
from the state; inside a chunk, key s has its own log-scale
κ_s = max_m ℓ_m(k_s), the scores

  A_ts = Σ_m e^(ℓ_m(q_t) − γ_t) e^(ℓ_m(k_s) − κ_s),  γ_t = max_m ℓ_m(q_t)

have the log-weights log A_ts + γ_t + κ_s, s ≤ t, and the two parts are joined
at the largest log-scale of both, so that here too the largest term of the
normaliser is 1. Nothing at t reads a key after t.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from attention import arguments

_CHUNK = 128
"""C: positions in cache at a time; the state is stored once per chunk for the
backward pass, so memory is T/C · M·V beside the arguments."""

_EMPTY = -1e30
"""Log-scale of a state that has seen nothing: finite, so that differences are
numbers, and so low that e^(_EMPTY - anything real) is 0."""

_NEGLIGIBLE = 1e-30
"""Scores A_ts below it count as 0: their share is out of float32's reach and
the gradient of their logarithm would overflow."""


class PerformerState(NamedTuple):
  """What all keys seen so far leave behind; also the decode cache.

  Attributes:
    log_scale: c `[B, K, M]`, the largest log-feature seen.
    value: U `[B, K, M, V]`, Σ_s e^(ℓ_m(k_s) − c_m) v_s.
    total: Z `[B, K, M]`, Σ_s e^(ℓ_m(k_s) − c_m).
  """

  log_scale: Float[Array, "B K M"]
  value: Float[Array, "B K M V"]
  total: Float[Array, "B K M"]


def empty_state(
  batch: int, num_kv_heads: int, num_features: int, value_dim: int
) -> PerformerState:
  """The state that has seen nothing."""
  shape = (batch, num_kv_heads, num_features)
  return PerformerState(
    log_scale=jnp.full(shape, _EMPTY, jnp.float32),
    value=jnp.zeros((*shape, value_dim), jnp.float32),
    total=jnp.zeros(shape, jnp.float32),
  )


def absorb(
  state: PerformerState,
  log_key: Float[Array, "B K C M"],
  value: Float[Array, "B K C V"],
  keep: Bool[Array, "#B 1 C 1"],
) -> PerformerState:
  """Adds C keys to the state."""
  log_key = jnp.where(keep, log_key, _EMPTY)
  log_scale = jax.lax.stop_gradient(
    jnp.maximum(state.log_scale, jnp.max(log_key, axis=2))
  )
  features = jnp.where(keep, jnp.exp(log_key - log_scale[:, :, None]), 0.0)
  decay = jnp.exp(state.log_scale - log_scale)
  return PerformerState(
    log_scale=log_scale,
    value=state.value * decay[..., None]
    + jnp.einsum("BKCM,BKCV->BKMV", features, value),
    total=state.total * decay + jnp.sum(features, axis=2),
  )


def read(
  state: PerformerState, log_query: Float[Array, "B K Q M"]
) -> tuple[
  Float[Array, "B K Q V"], Float[Array, "B K Q"], Float[Array, "B K Q"]
]:
  """Reads the state: numerator and normaliser, both up to e^b, and b."""
  log_terms = log_query + state.log_scale[:, :, None]
  log_scale = jax.lax.stop_gradient(jnp.max(log_terms, axis=-1))
  terms = jnp.exp(log_terms - log_scale[..., None])
  numerator = jnp.einsum("BKQM,BKMV->BKQV", terms, state.value)
  normaliser = jnp.einsum("BKQM,BKM->BKQ", terms, state.total)
  return numerator, normaliser, log_scale


def ratio(
  numerator: Float[Array, "B K Q V"], normaliser: Float[Array, "B K Q"]
) -> Float[Array, "B K Q V"]:
  """Numerator / normaliser, zeros where a query saw nothing."""
  safe = jnp.where(normaliser == 0.0, 1.0, normaliser)
  return numerator / safe[..., None]


def _sizes(length: int) -> tuple[int, int]:
  """Number of chunks and C; a short sequence is one chunk of its own length."""
  chunk = min(_CHUNK, length)
  return -(-length // chunk), chunk


def _in_chunks(
  x: Shaped[Array, "B L ..."], num_chunks: int, chunk: int
) -> Shaped[Array, "I B C ..."]:
  """Cuts or pads `x` to I chunks of C positions."""
  length = num_chunks * chunk
  x = x[:, :length]
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, length - x.shape[1])
  x = jnp.pad(x, widths)
  x = x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _key_chunks(
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  num_chunks: int,
  chunk: int,
) -> tuple[Array, Array, Array]:
  """Keys, values and which of them count, in chunks; contents of others 0.

  Zeroing keeps whatever stands in padding (inf, nan) out of the products.
  """
  if keep is None:
    keep = jnp.ones(key.shape[:2], bool)
  key = jnp.where(keep[:, :, None, None], key, 0)
  value = jnp.where(keep[:, :, None, None], value, 0)
  key, value, keep = (
    _in_chunks(x, num_chunks, chunk) for x in (key, value, keep)
  )
  return key, value, keep


def query_rows(
  chunk: Float[Array, "B C N H"], num_kv_heads: int
) -> Float[Array, "B K Q H"]:
  """Queries in float32, those that share a key head together, Q = N/K · C."""
  return arguments.rows_by_key_head(chunk, num_kv_heads).astype(jnp.float32)


def key_rows(x: Float[Array, "B C K D"]) -> Float[Array, "B K C D"]:
  """Keys or values in float32, heads next to the batch."""
  return jnp.swapaxes(x, 1, 2).astype(jnp.float32)


def _ungroup(
  chunks: Float[Array, "I B K Q V"], query: Float[Array, "B T N H"]
) -> Float[Array, "B T N V"]:
  """Puts chunks of results back in the order of `query`."""
  batch, length, num_heads, _ = query.shape
  value_dim = chunks.shape[-1]
  chunks = chunks.reshape(len(chunks), batch, num_heads, -1, value_dim)
  out = jnp.einsum("IBNCV->BICNV", chunks)
  return out.reshape(batch, -1, num_heads, value_dim)[:, :length]


def bidirectional(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  log_features: Callable[[Array], Array],
) -> Float[Array, "B T N V"]:
  """One pass over the keys fills the state, one over the queries reads it.

  `keep` says which keys count, `log_features` is ℓ: `[…, H]` to `[…, M]`.
  """
  num_kv_heads = key.shape[2]

  @jax.checkpoint
  def fill(state, chunk):
    key, value, keep = chunk
    return absorb(
      state,
      log_features(key_rows(key)),
      key_rows(value),
      keep[:, None, :, None],
    ), None

  @jax.checkpoint
  def answer(chunk):
    log_query = log_features(query_rows(chunk, num_kv_heads))
    numerator, normaliser, _ = read(state, log_query)
    return ratio(numerator, normaliser)

  num_features = jax.eval_shape(log_features, key).shape[-1]
  state, _ = jax.lax.scan(
    fill,
    empty_state(key.shape[0], num_kv_heads, num_features, value.shape[-1]),
    _key_chunks(key, value, keep, *_sizes(key.shape[1])),
  )
  chunks = _in_chunks(query, *_sizes(query.shape[1]))
  return _ungroup(jax.lax.map(answer, chunks), query)


def causal(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  log_features: Callable[[Array], Array],
) -> Float[Array, "B T N V"]:
  """Walks chunks: reads the state of earlier ones, then adds its own keys.

  `keep` says which keys count, `log_features` is ℓ: `[…, H]` to `[…, M]`.
  """
  num_kv_heads = key.shape[2]

  @jax.checkpoint
  def step(state, chunk):
    query, key, value, keep = chunk
    log_query = log_features(query_rows(query, num_kv_heads))
    log_key = log_features(key_rows(key))
    value = key_rows(value)
    keep = keep[:, None, :, None]
    out = _read_causally(state, log_query, log_key, value, keep)
    return absorb(state, log_key, value, keep), out

  num_features = jax.eval_shape(log_features, key).shape[-1]
  sizes = _sizes(query.shape[1])
  _, out = jax.lax.scan(
    step,
    empty_state(key.shape[0], num_kv_heads, num_features, value.shape[-1]),
    # Keys past the last query are never seen, missing ones count as masked.
    (_in_chunks(query, *sizes), *_key_chunks(key, value, keep, *sizes)),
  )
  return _ungroup(out, query)


def _read_causally(
  state: PerformerState,
  log_query: Float[Array, "B K Q M"],
  log_key: Float[Array, "B K C M"],
  value: Float[Array, "B K C V"],
  keep: Bool[Array, "#B 1 C 1"],
) -> Float[Array, "B K Q V"]:
  """Joins the state of earlier chunks with the keys s ≤ t of this one."""
  earlier, earlier_total, earlier_scale = read(state, log_query)

  key_scale = jax.lax.stop_gradient(
    jnp.max(jnp.where(keep, log_key, _EMPTY), axis=-1)
  )
  query_scale = jax.lax.stop_gradient(jnp.max(log_query, axis=-1))
  scores = jnp.einsum(
    "BKQM,BKCM->BKQC",
    jnp.exp(log_query - query_scale[..., None]),
    jnp.exp(jnp.where(keep, log_key - key_scale[..., None], _EMPTY)),
  )
  # Query row j·C + t of the Q = J·C rows stands at position t of the chunk.
  chunk = log_key.shape[2]
  past = jnp.tri(chunk, dtype=bool)
  past = jnp.tile(past, (log_query.shape[2] // chunk, 1))
  # Not `scores > …`: a nan must not be hidden.
  seen = past[None, None] & ~(scores <= _NEGLIGIBLE)
  log_weights = jnp.where(
    seen,
    jnp.log(jnp.where(seen, scores, 1.0))
    + (query_scale[..., None] + key_scale[:, :, None]),
    _EMPTY,
  )
  joint_scale = jax.lax.stop_gradient(
    jnp.maximum(earlier_scale, jnp.max(log_weights, axis=-1))
  )
  weights = jnp.where(seen, jnp.exp(log_weights - joint_scale[..., None]), 0.0)
  decay = jnp.exp(earlier_scale - joint_scale)
  return ratio(
    earlier * decay[..., None] + jnp.einsum("BKQC,BKCV->BKQV", weights, value),
    earlier_total * decay + jnp.sum(weights, axis=-1),
  )
