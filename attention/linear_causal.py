"""The causal loop behind linear attention, with its own backward.

Chunk i holds the queries from i·C on and the keys of the same positions. Keys
of earlier chunks are read from the state (`linear_state`);
inside a chunk, where s ≤ t, the weights are the scores themselves
(`linear_chunk`). Nothing at t reads a key after t.

Backward, chunks in reverse, each from the state before it. The forward pass
keeps every fourth of those, R·C/T·(V+1)·M numbers, and three are made again:
to keep them all would take more than query, key and value together. With
P_ts = A_ts / n_t and (g, δ) as in `linear_state`, log A_ts gets
P_ts (g_t·v_s + δ_t), and log φ_m(q_t) both r_tm (U_m·g_t + Z_m δ_t) and its
share of the chunk, Σ_s P_ts (g_t·v_s + δ_t) φ_m(q_t) φ_m(k_s) / A_ts.

Second derivatives are taken forward over reverse (`jax.hessian`); a gradient of
a gradient would have to reverse loops whose length is not known.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import linear_chunk, linear_state
from attention.blocks import add, cut, dot, heads_last, put, turned
from attention.linear_blocks import (
  FeatureMap,
  Operands,
  add_keys,
  cut_cotangent,
  cut_keys,
  features_of,
  sizes,
  to_rows,
  told,
)
from attention.linear_chunk import Chunk

CHUNK = 64
"""C: a quarter of what the other form takes: scores of a chunk are C×C. Of
Performer, whose features are logarithms, 128 takes 0.83 of the time forward and
twice the memory; of other maps 1.3."""

_GROUP = 4
"""R: chunks for which one state is kept."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal(
  features: FeatureMap, operands: Operands, keep: Bool[Array, "B S"] | None
) -> Float[Array, "B T N V"]:
  """Linear attention of query t to the keys s ≤ t; `keep`: which count."""
  return _forward(features, operands, keep, save=False)[0]


def _cut_chunk(operands, keep, first, size):
  """The chunk from `first` on; of earlier positions only queries, again."""
  query, key = operands.query, operands.key
  length, (source_length, num_kv_heads) = query.shape[1], key.shape[1:3]
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
  return Chunk(start, rows, keys, seen)


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
  batch, length = query.shape[:2]
  size, num_chunks = sizes(length, CHUNK)

  def step(i, carry):
    state, out, norm, saved = carry
    if save:
      # Of the chunks with one ⌈i/R⌉ the last remains, the first of a group.
      saved = _put(saved, state, -(-i // _GROUP))
    chunk = _cut_chunk(operands, keep, i * size, size)
    query_features, key_features = (
      features_of(features, x, constants) for x in (chunk.query, chunk.keys.key)
    )
    results = linear_state.finish(
      *linear_chunk.read(state, query_features, key_features, chunk)
    )
    results = [heads_last(x, batch, size) for x in results]
    if length % size:
      # Rows of the chunk before are there already; the state is past them.
      is_new = chunk.start + jnp.arange(size) >= i * size
      results = [
        jnp.where(is_new[None, :, None, None], x, cut(whole, chunk.start, size))
        for x, whole in zip(results, (out, norm), strict=True)
      ]
    out, norm = (
      put(whole, x, chunk.start)
      for x, whole in zip(results, (out, norm), strict=True)
    )
    state = linear_state.absorb(
      state, key_features, chunk.keys.value, chunk.keys.keep
    )
    return state, out, norm, saved

  state = _empty(features, operands)
  saved = None
  if save:
    saved = _stack(state, -(-num_chunks // _GROUP))
  out = jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype)
  norm = jnp.zeros((*query.shape[:3], 1), jnp.float32)
  _, out, norm, saved = jax.lax.fori_loop(
    0, num_chunks, step, (state, out, norm, saved)
  )
  return out, norm, saved


def _stack(state, size):
  """Room for so many states."""
  return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), state)


def _put(states, state, i):
  return jax.tree.map(lambda xs, x: xs.at[i].set(x, mode="drop"), states, state)


def _take(states, i):
  return jax.tree.map(lambda xs: xs[i], states)


def _causal_fwd(features, operands, keep):
  out, norm, saved = _forward(features, operands, keep, save=True)
  return out, (operands, keep, out, norm, saved)


def _causal_bwd(features, residuals, cotangent):
  operands, keep, out, norm, saved = residuals
  query, key, value, constants = operands
  batch, length = query.shape[:2]
  num_kv_heads = key.shape[2]
  size, num_chunks = sizes(length, CHUNK)
  to_features = partial(features_of, features)

  def again(i, carry):
    """State i of a group, from the one before."""
    first, state, states = carry
    start = (first + i - 1) * size
    keys = _cut_chunk(operands, keep, start, size).keys
    key_features = to_features(keys.key, constants)
    state = linear_state.absorb(state, key_features, keys.value, keys.keep)
    return first, state, _put(states, state, i)

  def step(i, carry):
    """Chunk i of a group."""
    first, states, (d_query, d_key, d_value, d_constants, d_sums) = carry
    state = _take(states, i)
    i += first
    chunk = _cut_chunk(operands, keep, i * size, size)
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
    d_sums += dot("avq,aqm->avm", turned(g), terms)

    inner = linear_chunk.pull(
      linear_chunk.Gradients(d_query_features, d_key_features, d_value_rows),
      features.is_log,
      query_features,
      key_features,
      chunk,
      g,
      n,
    )
    d_query_rows, more = query_pullback(inner.query)
    d_key_rows, and_more = key_pullback(inner.key)
    d_query_rows = heads_last(d_query_rows, batch, size)
    place = put if length % size == 0 else add
    gradients = (
      place(d_query, d_query_rows, chunk.start),
      *add_keys(d_key, d_value, d_key_rows, inner.value, keys),
      jax.tree.map(lambda *xs: sum(xs), d_constants, more, and_more),
      d_sums,
    )
    return first, states, gradients

  def group(j, gradients):
    j = num_groups - 1 - j
    first = j * _GROUP
    count = jnp.minimum(_GROUP, num_chunks - first)
    state = _take(saved, j)
    states = _put(_stack(state, _GROUP), state, 0)
    _, _, states = jax.lax.fori_loop(1, count, again, (first, state, states))

    def reverse(i, carry):
      return step(count - 1 - i, carry)

    return jax.lax.fori_loop(0, count, reverse, (first, states, gradients))[2]

  num_groups = -(-num_chunks // _GROUP)
  zeros = jax.tree.map(
    jnp.zeros_like,
    (query, key, value, constants, _empty(features, operands).sums),
  )
  gradients = jax.lax.fori_loop(0, num_groups, group, zeros)
  return Operands(*gradients[:-1]), None


causal.defvjp(_causal_fwd, _causal_bwd)
