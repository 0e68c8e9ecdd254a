"""Linear attention of query t to the keys s ≤ t, with its own backward.

The sequence is cut into chunks of C positions. Keys of earlier chunks are read
from the state (`state`). Inside a chunk, where s ≤ t, the weights are the
scores themselves (`chunk`). Nothing at t reads a key after t.

A step of the loop takes G chunks at once. Their products are batched, and only
the states before them depend on one another, which `state.update_by_chunk`
solves. On a CPU, G is 1. Elsewhere it is as many chunks as the platform's
budget of bytes allows, so that the loop is short.

The backward takes the steps in reverse. The forward keeps the state before each
group of P steps, and the backward computes the states in between again, because
all of them together would be larger than query, key and value. At most one
state of (V+1)·M numbers is kept for every `GROUP` chunks.

With W_ts = A_ts / n_t, and (g, δ) as in `state`, the gradient of log A_ts is
W_ts (g_t·v_s + δ_t). That of log φ_m(q_t) is r_tm (U_m·g_t + Z_m δ_t) plus its
share of the chunk, Σ_s W_ts (g_t·v_s + δ_t) φ_m(q_t) φ_m(k_s) / A_ts.

`sums` gives numerator and normaliser apart, for a mechanism that adds terms of
its own to both: n is 1, and the cotangent of the sums takes the place of
(g, δ).

Second derivatives are taken forward over reverse (`jax.hessian`). A gradient of
a gradient would have to reverse loops whose length is not known.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from attention.core import platform
from attention.core.layout import cut, heads_last, put
from attention.linear import blocks, chunk, state
from attention.linear.blocks import KeyBlock, Steps
from attention.linear.features import FeatureMap, Operands
from attention.linear.state import LinearState

CHUNK = 64
"""C. It is smaller than `blocks.BLOCK` because scores are C×C. See
benchmarks/README.md."""

GROUP = 4
"""The chunks for which one state is kept; those of a step if they are more."""


class Plan(NamedTuple):
  """How a sequence is cut; hashable.

  Attributes:
    steps: blocks of G·C positions.
    group: P, steps for which one state is kept.
    chunks: G, chunks of a step.
  """

  steps: Steps
  group: int
  chunks: int


class Chunks(NamedTuple):
  """The G chunks of a step.

  Attributes:
    query: `[B, K, G, Q, H]`.
    keys: the keys of the same positions, not cut into chunks.
    key: `[B, K, G, C, H]`.
    value: `[B, K, G, C, V]`.
    keep: which keys count; None is all.
    seen: whether s ≤ t within a chunk, and s counts.
  """

  query: Float[Array, "B K G Q H"]
  keys: KeyBlock
  key: Float[Array, "B K G C H"]
  value: Float[Array, "B K G C V"]
  keep: Bool[Array, "#B 1 G C 1"] | None
  seen: Bool[Array, "#B 1 #G Q C"]


def attend(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  chunk_size: int | None,
  before: LinearState | None = None,
) -> Float[Array, "B T N V"]:
  """Linear attention to keys that count and are not later than the query.

  Keys after the last query are left out. Where there are fewer keys than
  queries, keys that do not count are added, so that chunks of queries and of
  keys are the same positions.

  Args:
    features: the feature map.
    operands: the arrays.
    keep: which keys count; None is all.
    chunk_size: C; None is `CHUNK`.
    before: the state of earlier keys; None has none. Gradients flow through its
      sums.

  Returns:
    `[B, T, N, V]` in the dtype of the query.
  """
  return _fitted(features, True, operands, keep, chunk_size, before)


def sums(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  chunk_size: int | None,
  before: LinearState | None = None,
) -> Float[Array, "B T N X"]:
  """Numerator and, in the last column, normaliser of `attend`, X = V+1.

  Args:
    features: the feature map, not of logarithms.
    operands: the arrays.
    keep: which keys count; None is all.
    chunk_size: C; None is `CHUNK`.
    before: as in `attend`.

  Returns:
    Σ_s φ(q_t)·φ(k_s) (v_s, 1) over s ≤ t, `[B, T, N, V+1]` in float32.
  """
  return _fitted(features, False, operands, keep, chunk_size, before)


def _fitted(features, divided, operands, keep, chunk_size, before):
  """`_attend` of keys that are cut or filled up to the queries."""
  query, key, value, parameters = operands
  length, source_length = query.shape[1], key.shape[1]
  plan = _plan(query, features.size, chunk_size)
  whole = plan.steps.length
  if keep is None and source_length < whole:
    keep = jnp.ones((key.shape[0], source_length), bool)
  query, key, value = (_fit(x, whole) for x in (query, key, value))
  if keep is not None:
    keep = _fit(keep, whole)
  operands = Operands(query, key, value, parameters)
  if before is None:
    before = state.empty(
      len(key), key.shape[2], features.size, value.shape[-1], features.is_log
    )
  return _attend(features, plan, divided, operands, keep, before)[:, :length]


def _plan(
  query: Float[Array, "B T N H"], num_features: int, chunk_size: int | None
) -> Plan:
  """Cuts the sequence into equal parts; C is at most `chunk_size`."""
  length = query.shape[1]
  size = min(chunk_size or CHUNK, length)
  tile = blocks.block_bytes(query, size, num_features)
  total = _shares(length, size)
  chunks = platform.tiles_at_once(tile, total)
  group = _shares(GROUP, chunks)
  groups = _shares(total, group * chunks)
  group = _shares(total, groups * chunks)
  chunks = _shares(total, groups * group)
  size = chunks * _shares(length, groups * group * chunks)
  return Plan(Steps(max(length, size), size, groups * group), group, chunks)


def _shares(whole, part):
  return -(-whole // part)


def _fit(x, length):
  """`x` cut or filled up to `length` positions."""
  if x.shape[1] >= length:
    return x[:, :length]
  missing = [(0, 0)] * x.ndim
  missing[1] = (0, length - x.shape[1])
  return jnp.pad(x, missing)


def _to_chunks(
  x: Shaped[Array, "#B #K Y D"], plan: Plan
) -> Shaped[Array, "#B #K G Q D"]:
  """Rows of J heads, one head after another, as rows of chunks."""
  size = plan.steps.size // plan.chunks
  x = x.reshape(*x.shape[:2], -1, plan.chunks, size, x.shape[-1])
  x = jnp.swapaxes(x, 2, 3)
  return x.reshape(*x.shape[:3], -1, x.shape[-1])


def _from_chunks(
  x: Shaped[Array, "B K G Q D"], plan: Plan
) -> Shaped[Array, "B K Y D"]:
  """Undoes `_to_chunks`."""
  size = plan.steps.size // plan.chunks
  x = x.reshape(*x.shape[:3], -1, size, x.shape[-1])
  x = jnp.swapaxes(x, 2, 3)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _cut_chunks(operands, keep, plan, i):
  """The chunks of step i; keys of earlier steps do not count again."""
  steps, kv_heads = plan.steps, operands.key.shape[2]
  keys = blocks.cut_keys(operands.key, operands.value, keep, i, steps)
  rows = blocks.rows_of(operands.query, i, steps, kv_heads)
  query, key, value = (
    _to_chunks(x, plan) for x in (rows, keys.key, keys.value)
  )
  source = jnp.arange(key.shape[3])
  position = jnp.arange(query.shape[3]) % key.shape[3]
  seen, kept = (source[None, :] <= position[:, None])[None, None, None], None
  if keys.keep is not None:
    kept = _to_chunks(keys.keep, plan)
    seen &= jnp.swapaxes(kept, 3, 4)
  return Chunks(query, keys, key, value, kept, seen)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
  features: FeatureMap,
  plan: Plan,
  divided: bool,
  operands: Operands,
  keep: Bool[Array, "B T"] | None,
  before: LinearState,
) -> Float[Array, "B T N D"]:
  results, _ = _forward(
    features, plan, divided, operands, keep, before, save=False
  )
  return results[0]


def _forward(features, plan, divided, operands, keep, before, save):
  """The results, and the state before each group if `save`.

  The results are (out, n `[B, T, N, 1]`) if `divided`, and (sums,) if not.
  """
  query, _, value, parameters = operands
  steps = plan.steps

  def step(i, carry):
    before, *results = carry
    block = _cut_chunks(operands, keep, plan, i)
    query_features, key_features = (
      features.of(x, parameters) for x in (block.query, block.key)
    )
    states = state.update_by_chunk(
      before, key_features, block.value, block.keep
    )
    read = chunk.read_out(
      states.before, query_features, key_features, block.value, block.seen
    )
    rows = state.normalised(*read) if divided else read[:1]
    rows = [heads_last(_from_chunks(x, plan), steps.size) for x in rows]
    if not steps.is_whole:
      # Rows of the step before are written already; the state is past them.
      new = steps.is_new(i)[None, :, None, None]
      rows = [
        jnp.where(new, x, cut(whole, steps.start(i), steps.size))
        for x, whole in zip(rows, results, strict=True)
      ]
    results = (
      put(whole, x, steps.start(i))
      for x, whole in zip(rows, results, strict=True)
    )
    return states.after, *results

  def group(carry, first):
    after = jax.lax.fori_loop(
      0, plan.group, lambda i, carry: step(first + i, carry), carry
    )
    return after, carry[0]

  shape, width = query.shape[:3], value.shape[-1]
  if divided:
    results = (
      jnp.zeros((*shape, width), query.dtype),
      jnp.zeros((*shape, 1), jnp.float32),
    )
  else:
    results = (jnp.zeros((*shape, width + 1), jnp.float32),)
  carry = before, *results
  if save:
    (_, *results), saved = jax.lax.scan(group, carry, _firsts(plan))
    return results, saved
  _, *results = jax.lax.fori_loop(0, steps.count, step, carry)
  return results, None


def _firsts(plan):
  """The first step of every group."""
  return jnp.arange(0, plan.steps.count, plan.group)


def _attend_forward(features, plan, divided, operands, keep, before):
  results, saved = _forward(
    features, plan, divided, operands, keep, before, save=True
  )
  # The backward of sums does not read them.
  kept = results if divided else None
  return results[0], (operands, keep, kept, saved)


def _attend_backward(features, plan, divided, residuals, cotangent):
  operands, keep, results, saved = residuals
  query, key, value, parameters = operands

  def update(before, i):
    """The state before step i, and the one after it."""
    keys = _cut_chunks(operands, keep, plan, i)
    key_features = features.of(keys.key, parameters)
    states = state.update_by_chunk(before, key_features, keys.value, keys.keep)
    return states.after, before

  def step(carry, saved_step):
    d_query, d_key, d_value, d_parameters, d_after = carry
    i, before = saved_step
    block = _cut_chunks(operands, keep, plan, i)
    if divided:
      out, norm = results
      g, n = blocks.cut_cotangent(
        cotangent, out, norm, i, plan.steps, key.shape[2]
      )
    else:
      g = blocks.cut_sums(cotangent, i, plan.steps, key.shape[2])
      n = jnp.ones_like(g[..., :1])
    g, n = (_to_chunks(x, plan) for x in (g, n))
    query_features, query_pullback = jax.vjp(
      features.of, block.query, parameters
    )
    key_features, key_pullback = jax.vjp(features.of, block.key, parameters)
    states = state.update_by_chunk(
      before, key_features, block.value, block.keep
    )

    # Earlier keys, through the state before each chunk.
    d_query_features, d_sums = state.read_out_gradients(
      states.before, query_features, n, g
    )
    # Later queries, through the state after each chunk.
    d_states, d_before = state.recurrence(
      d_after, states.decay, d_sums, reverse=True
    )
    d_key_features, d_value_rows = state.update_gradients(
      states.terms, block.value, block.keep, d_states, features.is_log
    )
    # The other positions of the chunk.
    within = chunk.gradients(
      query_features,
      key_features,
      block.value,
      block.seen,
      g,
      n,
      features.is_log,
    )
    d_query_rows, more = query_pullback(d_query_features + within.query)
    d_key_rows, and_more = key_pullback(d_key_features + within.key)
    d_query_rows, d_key_rows, d_value_rows = (
      _from_chunks(x, plan)
      for x in (d_query_rows, d_key_rows, d_value_rows + within.value)
    )
    keys = block.keys
    gradients = (
      blocks.put_query_rows(d_query, d_query_rows, i, plan.steps),
      blocks.put_key_rows(d_key, d_key_rows, keys),
      blocks.put_key_rows(d_value, d_value_rows, keys),
      jax.tree.map(lambda *xs: sum(xs), d_parameters, more, and_more),
      d_before,
    )
    return gradients, None

  def group(gradients, saved_group):
    first, before = saved_group
    numbers = first + jnp.arange(plan.group)
    last, states = jax.lax.scan(update, before, numbers[:-1])
    states = jax.tree.map(
      lambda xs, x: jnp.concatenate([xs, x[None]]), states, last
    )
    return jax.lax.scan(step, gradients, (numbers, states), reverse=True)

  # The sums that the first group begins with are as large as all others.
  nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), saved)
  zeros = jax.tree.map(
    jnp.zeros_like, (query, key, value, parameters, nothing.sums)
  )
  gradients, _ = jax.lax.scan(
    group, zeros, (_firsts(plan), saved), reverse=True
  )
  d_query, d_key, d_value, d_parameters, d_sums = gradients
  return (
    Operands(d_query, d_key, d_value, d_parameters),
    None,
    LinearState(nothing.log_scale, d_sums),
  )


_attend.defvjp(_attend_forward, _attend_backward)
