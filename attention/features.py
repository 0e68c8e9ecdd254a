"""Attention through features of queries and keys, with one state for all keys.

With features φ(x) ≥ 0, M of them,

    out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s)

over all keys, or those s ≤ t. Values have a one appended, X = V+1, so that the last
column of every sum of values is the normaliser.

Performer's features overflow, so they are given as logarithms, and whatever is summed
is `Scaled`: a pair (c, x) that stands for e^c x. A state has one c for each feature,
the largest logarithm of the keys seen so far; what queries read has one for each row,
so that the largest term of its normaliser is at least 1. Pairs add up as in online
softmax (`join`). Scales cancel in the ratio, which therefore needs no epsilon, and no
gradient flows through them. Features that stay in float32's range have no scale.

Inside a chunk of the causal form, queries read keys by their scores. Those of
logarithms are a product with one scale for each query and one for each key. A row
whose largest features lie where those of its keys do not may be out of float32's range
then (n_t < 1e-24 up to these scales). Where a step has such rows, they are computed
again by halves: the queries of a later half see all keys of the earlier one, which
therefore have one scale for each feature. Whether a row is depends on the keys that it
sees, so no later key changes a bit of it.

Axes of a step are `[B, K, J, G, C, ·]`: G chunks of C rows, for each of the J = N/K
query heads of a key head; J is 1 for keys.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import device_scan, platform
from attention.scan import scan

CHUNK = 64
"""C of the causal form."""

BLOCK = 256
"""R, positions of a step that is not causal."""

_EMPTY = -1e30
"""The scale of no keys: finite, and below every other."""

_NOTHING = 1e-30
"""Lower normalisers count as 0: their inverse would overflow in the backward."""

_LOST = 1e-24
"""A normaliser below this may lack terms out of range."""


class FeatureMap(NamedTuple):
  """A feature map, known while a program is traced; hashable.

  Attributes:
    function: `(x [..., H], *params) -> [..., M]`, row by row: φ, or log φ.
    size: M.
    is_log: whether `function` returns logarithms.
  """

  function: Callable[..., Array]
  size: int
  is_log: bool = False

  def __call__(self, params: tuple[Array, ...], x: Array) -> Array:
    """The features of every row in float32."""
    return self.function(x.astype(jnp.float32), *params).astype(jnp.float32)


class Scaled(NamedTuple):
  """e^scale · sums; also the decode cache.

  Attributes:
    scale: `[*A, 1, M]` of a state, `[*A, C, 1]` of rows; None is 0.
    sums: `[*A, X, M]` of a state, `[*A, C, X]` of rows.
  """

  scale: Float[Array, "..."] | None
  sums: Float[Array, "..."]


def attend(
  phi: FeatureMap,
  params: tuple[Array, ...],
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  *,
  is_causal: bool,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Attention through any feature map.

  Args:
    phi: the feature map.
    params: its arrays.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    keep: which keys count; None is all.
    is_causal: query t sees keys s ≤ t.
    block_size: as `linear_attention` takes it.
    axis_name: inside `jax.shard_map`, of the devices that have a part of the
      sequence each. What crosses is the state: one sum, causal ⌈log₂ D⌉ + 1 messages.

  Returns:
    `[B, T, N, V]` in the dtype of the query.

  Raises:
    ValueError: `block_size` is neither None nor a positive int; parts of a causal
      call have two lengths.
  """
  is_size = isinstance(block_size, int) and not isinstance(block_size, bool)
  if block_size is not None and not (is_size and block_size > 0):
    raise ValueError(
      f"block_size: expected a positive int or None, got {block_size!r}"
    )
  sizes = {"block_size": block_size}
  if not is_causal:
    state = state_after(phi, params, None, key, value, keep, **sizes)
    if axis_name is not None:
      state = _of_all(state, axis_name)
    return read_all(phi, params, state, query, **sizes)
  state = None
  if axis_name is not None:
    if query.shape[1] != key.shape[1]:
      raise ValueError(
        "is_causal: expected parts of one length, got "
        f"{query.shape[1]} queries and {key.shape[1]} keys on a device"
      )
    state = state_before(phi, params, key, value, keep, axis_name)
  return causal(phi, params, state, query, key, value, keep, **sizes)


def empty(batch: int, kv_heads: int, phi: FeatureMap, value_dim: int) -> Scaled:
  """The state of no keys, float32 for activations of any dtype."""
  scale = None
  if phi.is_log:
    scale = jnp.full((batch, kv_heads, 1, phi.size), _EMPTY, jnp.float32)
  shape = batch, kv_heads, value_dim + 1, phi.size
  return Scaled(scale, jnp.zeros(shape, jnp.float32))


def join(one: Scaled | None, other: Scaled) -> Scaled:
  """The sum of two; None is nothing."""
  if one is None:
    return other
  if one.scale is None or other.scale is None:
    return Scaled(None, one.sums + other.sums)
  first, second = jax.lax.stop_gradient((one.scale, other.scale))
  scale = jnp.maximum(first, second)
  return Scaled(
    scale,
    one.sums * jnp.exp(first - scale) + other.sums * jnp.exp(second - scale),
  )


def _largest(x, axis):
  return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))


def _total(keys, values, is_log) -> Scaled:
  """The state of features `[*A, C, M]` and values `[*A, C, X]`."""
  scale = None
  if is_log:
    scale = _largest(keys, -2)
    keys = jnp.exp(keys - scale)
  return Scaled(scale, jnp.einsum("...cx,...cm->...xm", values, keys))


def _read(state: Scaled, queries) -> Scaled:
  """What features `[*A, C, M]` of queries read of a state."""
  scale = None
  if state.scale is not None:
    queries = queries + jax.lax.stop_gradient(state.scale)
    scale = _largest(queries, -1)
    queries = jnp.exp(queries - scale)
  return Scaled(scale, jnp.einsum("...cm,...xm->...cx", queries, state.sums))


def _scores(queries, keys, is_log) -> Scaled:
  """Σ_m φ_m(q_t) φ_m(k_s) where s ≤ t, `[*A, C, C]`, 0 elsewhere."""
  if not is_log:
    return Scaled(None, jnp.tril(_products(queries, keys)))
  query_scale, key_scale = _largest(queries, -1), _largest(keys, -1)
  seen_scale = jax.lax.cummax(key_scale, axis=key_scale.ndim - 2)
  apart = jnp.swapaxes(key_scale, -1, -2) - seen_scale
  is_seen = jnp.tri(keys.shape[-2], dtype=bool)
  factors = jnp.exp(jnp.where(is_seen, apart, -jnp.inf))
  products = _products(
    jnp.exp(queries - query_scale), jnp.exp(keys - key_scale)
  )
  plain = Scaled(query_scale + seen_scale, products * factors)
  is_lost = jnp.sum(plain.sums, axis=-1, keepdims=True) < _LOST
  is_lost &= seen_scale > 0.5 * _EMPTY

  def exact():
    by_halves = jax.checkpoint(_by_halves, prevent_cse=False)(queries, keys)
    return jax.tree.map(
      lambda one, other: jnp.where(is_lost, one, other), by_halves, plain
    )

  return jax.lax.cond(jnp.any(is_lost), exact, lambda: plain)


def _products(queries, keys):
  return jnp.einsum("...qm,...sm->...qs", queries, keys)


def _by_halves(queries, keys) -> Scaled:
  """`_scores` of logarithms at any distance."""
  size = keys.shape[-2]
  if size == 1:
    logs = queries + keys
    scale = _largest(logs, -1)
    return Scaled(scale, jnp.sum(jnp.exp(logs - scale), -1, keepdims=True))

  def halves(x):
    # Twice as many chunks, not one more axis: XLA:CPU aborts on products with eight.
    return x.reshape(*x.shape[:-3], -1, size // 2, x.shape[-1])

  own = _by_halves(halves(queries), halves(keys))
  first, second = (
    jax.tree.map(lambda x, i=i: x[..., i::2, :, :], own) for i in (0, 1)
  )
  earlier, later = keys[..., : size // 2, :], queries[..., size // 2 :, :]
  scale = _largest(earlier, -2)
  across = _read(Scaled(scale, jnp.exp(earlier - scale)), later)
  assert across.scale is not None
  scale = jnp.maximum(across.scale, second.scale)
  left = across.sums * jnp.exp(across.scale - scale)
  right = second.sums * jnp.exp(second.scale - scale)
  above = jnp.concatenate([first.sums, jnp.zeros_like(left)], axis=-1)
  below = jnp.concatenate([left, right], axis=-1)
  return Scaled(
    jnp.concatenate([first.scale, scale], axis=-2),
    jnp.concatenate([above, below], axis=-2),
  )


@jax.custom_jvp
def divided(sums: Float[Array, "*A X"]) -> Float[Array, "*A V"]:
  """Numerator / normaliser, the last column; 0 where that is nothing."""
  return sums[..., :-1] * _inverse(sums[..., -1:])


def _inverse(normaliser):
  nothing = jnp.abs(normaliser) <= _NOTHING  # False for nan, which must show.
  return jnp.where(nothing, 0.0, 1.0 / jnp.where(nothing, 1.0, normaliser))


@divided.defjvp
def _divided_jvp(primals, tangents):
  # The rule of JAX squares the normaliser, which leaves float32's range.
  (sums,), (change,) = primals, tangents
  change = change[..., :-1] - divided(sums) * change[..., -1:]
  return divided(sums), change * _inverse(sums[..., -1:])


def rows(x, kv_heads, count=1):
  """`[B, G·C, K·J, D]` as `[B, K, J, G, C, D]` with G = `count`."""
  batch, length, heads, width = x.shape
  shape = batch, count, length // count, kv_heads, heads // kv_heads, width
  return x.reshape(shape).transpose(0, 3, 4, 1, 2, 5)


def unrows(x):
  """Undoes `rows`."""
  x = x.transpose(0, 3, 4, 1, 2, 5)
  return x.reshape(len(x), x.shape[1] * x.shape[2], -1, x.shape[5])


def key_rows(phi, params, keys, count=1):
  """Features of keys, and values with ones; of hidden keys both are nothing."""
  key, value, keep = keys
  key, value = (rows(x, x.shape[2], count) for x in (key, value))
  keep = rows(keep[..., None, None], 1, count)
  values = jnp.pad(value, [(0, 0)] * 5 + [(0, 1)], constant_values=1)
  features = phi(params, jnp.where(keep, key, 0))
  if phi.is_log:
    features = jnp.where(keep, features, _EMPTY)
  return features, jnp.where(keep, values, 0).astype(jnp.float32)


def _state_step(phi, params, state, keys):
  own = _total(*key_rows(phi, params, keys), phi.is_log)
  return join(state, jax.tree.map(lambda x: x[:, :, 0, 0], own)), ()


def _read_step(phi, args, _, query):
  params, state = args
  state = jax.tree.map(lambda x: x[:, :, None, None], state)
  queries = phi(params, rows(query, state.sums.shape[1]))
  sums = _read(state, queries).sums
  return (), unrows(divided(sums)).astype(query.dtype)


def chunk_sums(
  is_log: bool,
  state: Scaled | None,
  queries: Float[Array, "B K J G C M"],
  features: Float[Array, "B K 1 G C M"],
  values: Float[Array, "B K 1 G C X"],
) -> tuple[Scaled, Scaled]:
  """The state after G chunks of keys, and what queries read of it and of s ≤ t.

  Both have features, values have ones; a state of None is nothing, for G = 1.
  """
  own = jax.tree.map(lambda x: x[:, :, 0], _total(features, values, is_log))
  scale, scores = _scores(queries, features, is_log)
  sums = Scaled(scale, jnp.einsum("...qs,...sx->...qx", scores, values))
  after = join(state, jax.tree.map(lambda x: x[:, :, 0], own))
  if state is None:
    return after, sums
  before = jax.tree.map(lambda x: x[:, :, None], state)
  if queries.shape[3] > 1:
    states = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), before, own)
    states = jax.lax.associative_scan(join, states, axis=2)
    before = jax.tree.map(lambda x: x[:, :, :-1], states)
    after = jax.tree.map(lambda x: x[:, :, -1], states)
  before = jax.tree.map(lambda x: x[:, :, None], before)
  return after, join(_read(before, queries), sums)


def _causal_step(phi, count, params, state, xs):
  query, *keys = xs
  queries = phi(params, rows(query, keys[0].shape[2], count))
  state, sums = chunk_sums(
    phi.is_log, state, queries, *key_rows(phi, params, keys, count)
  )
  return state, unrows(divided(sums.sums)).astype(query.dtype)


def _at_once(phi, x, size):
  """How many blocks of so many positions are one step; 1 on a CPU."""
  batch, length, num_heads, width = x.shape
  numbers = batch * size * num_heads * (phi.size + 2 * width)
  count = -(-length // size)
  steps = -(-count // platform.tiles_at_once(4 * numbers, count))
  return -(-count // steps)


def _block(phi, x, block_size):
  """The positions of a step that is not causal, as even as they can be."""
  size = block_size or BLOCK
  if block_size is None:
    size *= _at_once(phi, x, size)
  return -(-x.shape[1] // -(-x.shape[1] // size))


def state_after(
  phi: FeatureMap,
  params: tuple[Array, ...],
  state: Scaled | None,
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  block_size: int | None = None,
) -> Scaled:
  """A state, None for the empty one, with these keys, or those that `keep` names."""
  batch, length, kv_heads, value_dim = value.shape
  if keep is None:
    keep = jnp.ones((batch, length), bool)
  is_empty = state is None
  if state is None:
    state = empty(batch, kv_heads, phi, value_dim)
  return scan(
    functools.partial(_state_step, phi),
    params,
    state,
    (key, value, keep),
    size=_block(phi, key, block_size),
    is_empty=is_empty,
  )[0]


def read_all(
  phi: FeatureMap,
  params: tuple[Array, ...],
  state: Scaled,
  query: Float[Array, "B T N H"],
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """What all queries read of one state."""
  step = functools.partial(_read_step, phi)
  size = _block(phi, query, block_size)
  return scan(step, (params, state), (), query, size=size)[1]


def causal(
  phi: FeatureMap,
  params: tuple[Array, ...],
  state: Scaled | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """What query t reads of a state, None for the empty one, and of keys s ≤ t."""
  batch, length = query.shape[:2]
  kv_heads, value_dim = value.shape[2:]
  if keep is None:
    keep = jnp.ones(value.shape[:2], bool)
  is_empty = state is None
  if state is None:
    state = empty(batch, kv_heads, phi, value_dim)

  keys = fitted((key, value, keep), length)
  size = min(block_size or CHUNK, length)
  size = 1 << (size - 1).bit_length()
  count = _at_once(phi, query, size)
  return scan(
    functools.partial(_causal_step, phi, count),
    params,
    state,
    (query, *keys),
    size=size * count,
    is_empty=is_empty,
  )[1]


def fitted(arrays: Any, length: int) -> Any:
  """Arrays `[B, S, …]` as `[B, T, …]`: a chunk is queries and keys of one place."""

  def one(x):
    missing = max(0, length - x.shape[1])
    x = x[:, :length]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

  return jax.tree.map(one, arrays)


def state_before(
  phi: FeatureMap,
  params: tuple[Array, ...],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  axis_name: str,
) -> Scaled | None:
  """The state of the keys of all devices before this one; None on one device."""
  if jax.lax.axis_size(axis_name) == 1:
    return None
  own = state_after(phi, params, None, key, value, keep)
  scale = own.scale
  if scale is not None:
    scale = jnp.full_like(scale, _EMPTY)
  nothing = Scaled(scale, jnp.zeros_like(own.sums))
  return device_scan.before(own, join, nothing, axis_name)


def _of_all(own: Scaled, axis_name: str) -> Scaled:
  """The state of the keys of all devices."""
  if own.scale is None:
    return Scaled(None, jax.lax.psum(own.sums, axis_name))
  own_scale = jax.lax.stop_gradient(own.scale)
  scale = jax.lax.pmax(own_scale, axis_name)
  sums = jax.lax.psum(own.sums * jnp.exp(own_scale - scale), axis_name)
  return Scaled(scale, sums)


def decoding(
  feature_map: Callable[..., tuple[FeatureMap, tuple[Array, ...]]],
  projected: Callable[..., tuple[Array, Array]] = lambda _, *qk: qk,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
  """Of a record `init_cache`, `decode` and `prefill`; the cache is a state.

  Args:
    feature_map: `(variables, scale, head_dim) -> (map, params)`.
    projected: `(variables, query, key) -> (query, key)`, before features.
  """

  def init_cache(variables, batch, max_length, dims, dtype):
    del max_length, dtype
    phi, _ = feature_map(variables, None, dims.head_dim)
    return empty(batch, dims.num_kv_heads, phi, dims.values)

  def prefill(variables, state, query, key, value, lengths, *, scale=None):
    phi, params = feature_map(variables, scale, key.shape[-1])
    _, key = projected(variables, query, key)
    keep = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    return state_after(phi, params, state, key, value, keep)

  def decode(variables, state, query, key, value, *, scale=None):
    phi, params = feature_map(variables, scale, query.shape[-1])
    projections = projected(variables, query, key)
    state = state_after(phi, params, state, projections[1], value, None)
    out = read_all(phi, params, state, projections[0])
    return out.astype(query.dtype), state

  return init_cache, decode, prefill
