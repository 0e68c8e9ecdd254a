"""Linear attention with feature maps, whose state sums over all keys.

With M features φ(x) ≥ 0,

    out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

over all keys, or over s ≤ t. A one is appended to values, X = V+1, so that the last
column of every sum of values is the normaliser.

All sums are `Scaled`: a pair (c, x) that represents e^c x. Performer's features
overflow, so they are given as logarithms. A state has one c per feature, the largest
logarithm over its keys. The result of a query has one c per row, so that the largest
term of its normaliser is at least 1. `join` adds pairs as online softmax does: keys to
a state, the states of chunks, prompts and devices, and the results of a query for a
state and for its chunk. Scales cancel in the ratio, so no gradient flows through them.
Features that stay in the range of float32 have no scale.

Within a chunk, results are computed from scores. For log features, the scores are a
product with one scale per query and one per key. If a query and its keys are large in
different features, its row may underflow (its normaliser n_t < 1e-24 up to these
scales). A step with such rows recomputes them with a scale for each query and feature,
the largest over the visible keys, which acts like the decays of a recurrence (`pairs`).
Only visible keys decide whether a row is recomputed, so later keys never change its
bits.

Axes of a step are `[B, K, J, G, C, ·]`: G chunks of C rows, for each of the J = N/K
query heads of a key head; J is 1 for keys.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  device_prefix,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import pairs

BLOCK = 256
"""R, the number of positions in a non-causal step."""

_EMPTY = -1e30
"""The scale of an empty state: finite, and below every other scale."""

_MIN_NORMALISER = 1e-30
"""Smaller normalisers count as 0."""

_MIN_ACCURATE = 1e-24
"""Smaller normalisers may lack terms that underflow."""

_PRODUCT, _SUM = "...qm,...sm->...qs", "...qs,...sx->...qx"

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FeatureMap:
  """A feature map; a pytree of its arrays.

  Attributes:
    function: `(x [..., H], *params) -> [..., M]`, applied to each row: φ or log φ.
    size: M.
    is_log: whether `function` returns logarithms.
    params: arrays that `function` gets.
  """

  function: Callable[..., Array] = dataclasses.field(metadata=_STATIC)
  size: int = dataclasses.field(metadata=_STATIC)
  is_log: bool = dataclasses.field(default=False, metadata=_STATIC)
  params: Sequence[Array] = ()

  def __call__(self, x: Float[Array, "*A H"]) -> Float[Array, "*A M"]:
    """Computes the features of each row in float32."""
    features = self.function(x.astype(jnp.float32), *self.params)
    return features.astype(jnp.float32)


class Scaled(NamedTuple):
  """Represents e^scale · sums; also the cache for decoding.

  Attributes:
    scale: `[*A, 1, M]` for a state, `[*A, C, 1]` for rows; None means 0.
    sums: `[*A, X, M]` for a state, `[*A, C, X]` for rows.
  """

  scale: Float[Array, "..."] | None
  sums: Float[Array, "..."]


def empty_state(
  batch: int, kv_heads: int, phi: FeatureMap, value_dim: int
) -> Scaled:
  """Creates an empty state, in float32 for activations of any dtype."""
  scale = None
  if phi.is_log:
    scale = jnp.full((batch, kv_heads, 1, phi.size), _EMPTY, jnp.float32)
  shape = batch, kv_heads, value_dim + 1, phi.size
  return Scaled(scale, jnp.zeros(shape, jnp.float32))


def join(x: Scaled, y: Scaled) -> Scaled:
  """The sum of two scaled sums."""
  if x.scale is None or y.scale is None:
    return Scaled(None, x.sums + y.sums)
  x_scale, y_scale = jax.lax.stop_gradient((x.scale, y.scale))
  scale = jnp.maximum(x_scale, y_scale)
  sums = x.sums * jnp.exp(x_scale - scale)
  return Scaled(scale, sums + y.sums * jnp.exp(y_scale - scale))


def _max(x, axis):
  """The maximum along an axis, which is kept; it has no gradient."""
  return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))


def _chunk_state(features, values, is_log) -> Scaled:
  """The state of key features `[*A, C, M]` and values `[*A, C, X]`."""
  scale = None
  if is_log:
    scale = _max(features, -2)
    features = jnp.exp(features - scale)
  return Scaled(scale, jnp.einsum("...cx,...cm->...xm", values, features))


def _read_state(state: Scaled, queries) -> Scaled:
  """The scaled results of query features `[*A, C, M]` for a state."""
  scale = None
  if state.scale is not None:
    queries = queries + jax.lax.stop_gradient(state.scale)
    scale = _max(queries, -1)
    queries = jnp.exp(queries - scale)
  return Scaled(scale, jnp.einsum("...cm,...xm->...cx", queries, state.sums))


def normalize(sums: Float[Array, "*A X"]) -> Float[Array, "*A V"]:
  """Divides by the normaliser, the last column; returns 0 if that is near 0."""
  normaliser = jax.lax.stop_gradient(sums[..., -1:])
  # False for NaN, which must propagate.
  is_zero = jnp.abs(normaliser) <= _MIN_NORMALISER
  # First scale the normaliser to 1: the derivative of a quotient squares its
  # denominator, which could leave the range of float32.
  sums *= jnp.where(is_zero, 0.0, 1.0 / jnp.where(is_zero, 1.0, normaliser))
  return sums[..., :-1] / jnp.where(is_zero, 1.0, sums[..., -1:])


def _read_chunk(queries, keys, is_log) -> Scaled:
  """The scaled results of queries for keys s ≤ t of a chunk, from `[*A, C, C]` scores."""
  features, values = keys
  if not is_log:
    scores = jnp.tril(jnp.einsum(_PRODUCT, queries, features))
    return Scaled(None, jnp.einsum(_SUM, scores, values))
  query_scale, key_scale = _max(queries, -1), _max(features, -1)
  visible_scale = jax.lax.cummax(key_scale, axis=key_scale.ndim - 2)
  is_visible = jnp.tri(features.shape[-2], dtype=bool)
  log_ratio = jnp.swapaxes(key_scale, -1, -2) - visible_scale
  scaled = jnp.exp(queries - query_scale), jnp.exp(features - key_scale)
  scores = jnp.einsum(_PRODUCT, *scaled)
  scores *= jnp.exp(jnp.where(is_visible, log_ratio, -jnp.inf))
  scale = query_scale + visible_scale
  is_inaccurate = jnp.sum(scores, axis=-1, keepdims=True) < _MIN_ACCURATE
  is_inaccurate &= visible_scale > 0.5 * _EMPTY

  def recompute():
    largest = jax.lax.cummax(
      jax.lax.stop_gradient(features), axis=features.ndim - 2
    )
    row_scale = _max(queries + largest, -1)
    [[row_scores]] = jax.checkpoint(pairs, prevent_cse=False)(
      [jnp.exp(queries + largest - row_scale)],
      [jnp.exp(features - largest)],
      -jnp.diff(largest, axis=-2, prepend=largest[..., :1, :]),
    )
    return (
      jnp.where(is_inaccurate, row_scale, scale),
      jnp.where(is_inaccurate, row_scores, scores),
    )

  scale, scores = jax.lax.cond(
    jnp.any(is_inaccurate), recompute, lambda: (scale, scores)
  )
  return Scaled(scale, jnp.einsum(_SUM, scores, values))


def rows(x, kv_heads, count=1):
  """Reshapes `[B, G·C, K·J, D]` to `[B, K, J, G, C, D]` with G = `count`."""
  batch, length, heads, width = x.shape
  shape = batch, count, length // count, kv_heads, heads // kv_heads, width
  return x.reshape(shape).transpose(0, 3, 4, 1, 2, 5)


def join_rows(x):
  """Inverts `rows`."""
  x = x.transpose(0, 3, 4, 1, 2, 5)
  return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[5])


def key_features(phi, keys, count=1):
  """Features of keys, and values with a one appended; masked keys contribute 0."""
  key, value, keep = keys
  keys = key, value, keep[..., None, None]
  key, value, keep = (rows(x, x.shape[2], count) for x in keys)
  values = jnp.pad(value, [(0, 0)] * 5 + [(0, 1)], constant_values=1)
  features = phi(jnp.where(keep, key, 0))
  if phi.is_log:
    features = jnp.where(keep, features, _EMPTY)
  return features, jnp.where(keep, values, 0).astype(jnp.float32)


def chunk_sums(
  is_log: bool, state: Scaled | None, queries: Array, keys: tuple[Array, Array]
) -> tuple[Scaled, Scaled]:
  """The state after G chunks of keys, and the results of queries for keys s ≤ t.

  `queries` are features, and `keys` come from `key_features`. A `state` of None is the
  empty state, for G = 1.
  """

  def last_chunk(states):
    return jax.tree.map(lambda x: x[:, :, 0, -1], states)

  own, sums = _chunk_state(*keys, is_log), _read_chunk(queries, keys, is_log)
  if state is None:
    return last_chunk(own), sums
  first = jax.tree.map(lambda x: x[:, :, None, None], state)
  before = chunk_prefixes(join, first, own)
  state = join(last_chunk(before), last_chunk(own))
  return state, join(_read_state(before, queries), sums)


def attend(
  phi: FeatureMap,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  mask: Bool[Array, "..."] | None = None,
  *,
  is_causal: bool = False,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Attention with any feature map, with the options of `linear_attention`.

  With `axis_name`, each device has a shard of the sequence, inside `jax.shard_map`.
  Devices exchange states: in one sum, or in causal calls by ⌈log₂ D⌉ + 1 messages.

  Raises:
    ValueError: the mask varies along queries, `block_size` is neither None nor a
      positive int, or queries and keys of a causal call have shards of different
      lengths.
  """
  if block_size is not None:
    checks.check_at_least("block_size", block_size, 1)
  keys = key, value, visible_keys(mask, query, key)
  is_sharded = is_sequence_sharded(axis_name)
  if not is_causal:
    state = update_state(phi, None, keys, block_size)
    if is_sharded:
      scale, (own_scale, sums) = None, state
      if own_scale is not None:
        own_scale = jax.lax.stop_gradient(own_scale)
        scale = jax.lax.pmax(own_scale, axis_name)
        sums *= jnp.exp(own_scale - scale)
      state = Scaled(scale, jax.lax.psum(sums, axis_name))
    return query_state(phi, state, query, block_size)

  length = query.shape[1]
  if is_sharded:
    state = state_before(phi, keys, length, axis_name)
  else:
    state = empty_state(key.shape[0], key.shape[2], phi, value.shape[3])
  size = chunk_size(length, block_size)
  count = chunks_per_step(query, size, phi.size + 2 * query.shape[3])
  step, size = functools.partial(_causal_step, count), count * size
  xs = query, *keys
  return scan(step, phi, state, xs, size=size, is_empty=not is_sharded)[1]


def _causal_step(count, phi, state, xs):
  query, *keys = xs
  queries = phi(rows(query, keys[0].shape[2], count))
  keys = key_features(phi, keys, count)
  state, sums = chunk_sums(phi.is_log, state, queries, keys)
  return state, join_rows(normalize(sums.sums)).astype(query.dtype)


def visible_keys(mask, query, key, *instead: str) -> Bool[Array, "B S"]:
  """The keys that a key mask allows; takes the arguments of `checks.key_mask`."""
  keep = checks.key_mask(mask, query, key, *instead)
  return jnp.ones(key.shape[:2], bool) if keep is None else keep


def _positions_per_step(phi, x, block_size):
  """The number of positions per non-causal step; all steps have equal size."""
  size, length = block_size, x.shape[1]
  if size is None:
    size = BLOCK * chunks_per_step(x, BLOCK, phi.size + 2 * x.shape[3])
  return -(-length // -(-length // size))


def update_state(
  phi: FeatureMap,
  state: Scaled | None,
  keys: Sequence[Array],
  block_size: int | None = None,
) -> Scaled:
  """Adds the keys of (key, value, keep) to a state; None means the empty state."""
  is_empty = state is None
  if state is None:
    batch, _, kv_heads, value_dim = keys[1].shape
    state = empty_state(batch, kv_heads, phi, value_dim)
  size, xs = _positions_per_step(phi, keys[0], block_size), tuple(keys)
  return scan(_state_step, phi, state, xs, size=size, is_empty=is_empty)[0]


def _state_step(phi, state, keys):
  own = _chunk_state(*key_features(phi, keys), phi.is_log)
  own = jax.tree.map(lambda x: x[:, :, 0, 0], own)
  return own if state is None else join(state, own), ()


def query_state(
  phi: FeatureMap, state: Scaled, query: Array, block_size: int | None = None
) -> Float[Array, "B T N V"]:
  """Computes the results of all queries for one state."""
  size = _positions_per_step(phi, query, block_size)
  return scan(_query_step, (phi, state), (), query, size=size)[1]


def _query_step(params, _, query):
  phi, state = params
  state = jax.tree.map(lambda x: x[:, :, None, None], state)
  queries = phi(rows(query, state.sums.shape[1]))
  sums = _read_state(state, queries).sums
  return (), join_rows(normalize(sums)).astype(query.dtype)


def state_before(
  phi: FeatureMap, keys: Sequence[Array], length: int, axis_name: str
) -> Scaled:
  """The state of the keys of all earlier devices."""
  if keys[0].shape[1] != length:
    raise ValueError(
      "is_causal: expected as many keys as queries on each device, got "
      f"{length} queries and {keys[0].shape[1]} keys"
    )
  own = update_state(phi, None, keys)
  batch, kv_heads, width, _ = own.sums.shape
  first = empty_state(batch, kv_heads, phi, width - 1)
  return device_prefix(join, first, own, axis_name)


def root_scale(
  scale: float | Float[Array, ""] | None, head_dim: int
) -> Float[Array, ""]:
  """√scale; None means 1/√H.

  Raises:
    ValueError: the scale is not above 0.
  """
  scale = checks.softmax_scale(scale, head_dim)
  if not isinstance(scale, jax.Array) and scale <= 0.0:
    raise ValueError(
      f"scale: expected > 0, as its square root scales query and key, got {scale}"
    )
  return jnp.sqrt(jnp.float32(scale))
