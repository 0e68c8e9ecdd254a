"""Softmax attention to near keys and linear attention to far keys, normalised together.

One scan over chunks computes both (Zhang et al., 2025). Its state is the last W keys
before a chunk, and the sums over all earlier keys. Each query of a chunk attends by
softmax to its last W keys, in the state and the chunk. The keys that leave the window
in a chunk are a chunk of linear attention.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.linear import hedgehog_features, identity_kernels, project_heads
from attention.mechanism import Attention, Hyperparameters
from attention.platform import layout
from attention.recurrent.features import (
  FeatureMap,
  Scaled,
  chunk_sums,
  empty_state,
  join_rows,
  key_features,
  normalize,
  rows,
  state_before,
  update_state,
  visible_keys,
)
from attention.recurrent.scan import chunk_size, chunks_per_step, scan
from attention.softmax import sharding

_INITIAL_GAMMA = 0.1
"""The initial γ, as in the configs of the paper's code."""


@attention_function
def window_linear_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  mix: Float[Array, "N"],
  window: int,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Softmax attention to the last W keys and linear attention to all earlier ones.

    out = window_linear_attention(q, k, v, query_kernel=w, key_kernel=u, mix=g,
        window=64, is_causal=True)

    out_t = (γ Σ_near e^(x_ts − m_t) v_s + Σ_far φ(q_t)·φ(k_s) v_s)
            / (γ Σ_near e^(x_ts − m_t) + Σ_far φ(q_t)·φ(k_s))
    near: t − W < s ≤ t    far: s ≤ t − W
    x_ts = scale · q_t·k_s    m_t = max_near x_ts    γ = sigmoid(mix)
    φ(q_t) = [softmax(q_t W_q), softmax(−q_t W_q)], and likewise φ(k_s) with W_k

  The far terms are added to exponentials whose largest is 1, so m_t is part of the
  definition, and gradients flow through it.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    query_kernel: W_q `[N, H, H]`, with the query's features first.
    key_kernel: W_k `[K, H, H]`.
    mix: `[N]`, the logit of γ.
    window: W ≥ 1, the number of near keys, including the query's own, as in
      `sliding_window_attention` with `window=(W - 1, 0)`.
    is_causal: must be True, because the mechanism is causal by definition.
    scale: factor of the near logits; None means 1/√H. It does not affect φ.
    mask: key mask `[B, 1, 1, S]`.
    block_size: C, the number of positions of a chunk.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; zeros for a query that sees no key, or only
    far keys with a normaliser under 1e-30.

  Raises:
    ValueError: the mask varies along queries, or `is_causal` is False.

  Cost: time T·N·(H² + (W+2C)·(H+V) + 2H·(H+V)), and S·K·H² for the keys; memory of one
  chunk, with gradients also W keys and values and a state of 2H·V numbers per head for
  each chunk.

  Differs from the paper in masks, and in one W_k per key head, where the paper's code
  has one per query head. γ is a sigmoid, as in that code, and windows slide, as in the
  paper's formula. The code clips features to 1e-12 or more; here they may
  underflow. Its configs have `feature_dim=64` with `head_dim=128`; here W is square.

  Paper: LoLCATs: on low-rank linearizing of large language models, section 3.2,
  arXiv:2410.10254. The features are those of Hedgehog, arXiv:2402.04347.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; window_linear attention is causal by "
      "definition; give is_causal=True, or use sliding_window or linear "
      "attention in both directions"
    )
  params = _params(query, query_kernel, key_kernel, mix, scale)
  keys = key, value, visible_keys(mask, query, key)
  return _attend(params, query, keys, window, block_size, axis_name)


def _features(head_dim: int) -> FeatureMap:
  return FeatureMap(hedgehog_features, 2 * head_dim)


def _params(query, query_kernel, key_kernel, mix, scale):
  """The parameters of a step: W_q, W_k, γ and the scale."""
  scale = checks.softmax_scale(scale, query.shape[-1])
  gamma = jax.nn.sigmoid(mix.astype(jnp.float32))
  return query_kernel, key_kernel, gamma, jnp.float32(scale)


def _masked_keys(keys, window):
  """Masked keys, for the window before the first position."""
  return tuple(
    jnp.zeros((x.shape[0], window, *x.shape[2:]), x.dtype) for x in keys
  )


def _attend(params, query, keys, window, block_size=None, axis_name=None):
  """The scan over a whole sequence, or over a device's shard.

  Its state is the keys, values and mask of W positions, and the sums over earlier ones.
  Devices exchange W positions of keys and values, and log₂ D + 1 states of K·2H·(V+1)
  numbers.
  """
  batch, length, _, head_dim = query.shape
  kv_heads, value_dim = keys[1].shape[2:]
  # The mask is float, because a boolean state has no derivative if B is symbolic.
  keys = *keys[:2], keys[2].astype(jnp.float32)
  phi = _features(head_dim)
  is_sharded = axis_name is not None and jax.lax.axis_size(axis_name) > 1
  if is_sharded:
    extended = [sharding.exchange_halo(x, window, 0, axis_name) for x in keys]
    far_keys = [x[:, :length] for x in extended]
    far_keys[2] = far_keys[2] > 0
    far_keys[0] = project_heads(params[1], far_keys[0], far_keys[2])
    far = state_before(phi, far_keys, length, axis_name)
    near = tuple(x[:, :window] for x in extended)
  else:
    window = min(window, length)
    far = empty_state(batch, kv_heads, phi, value_dim)
    near = _masked_keys(keys, window)
  size = chunk_size(length, block_size)
  numbers = 2 * size + window + 4 * head_dim + 2 * value_dim
  numbers += (window + size) // size * (head_dim + value_dim)
  count = chunks_per_step(query, size, numbers)
  return scan(
    functools.partial(_step, count, window),
    params,
    (near, far),
    (query, *keys),
    size=size * count,
    is_empty=not is_sharded,
  )[1]


def _step(count, window, params, state, xs):
  """`count` chunks of queries and keys."""
  query_kernel, key_kernel, gamma, scale = params
  query, *keys = xs
  _, length, _, head_dim = query.shape
  kv_heads, size = keys[0].shape[2], length // count
  near, far = (_masked_keys(keys, window), None) if state is None else state
  keys = [jnp.concatenate(x, axis=1) for x in zip(near, keys, strict=True)]
  key, value, keep = *keys[:2], keys[2] > 0
  # Keys that leave the window.
  far_keys = [x[:, :length] for x in (key, value, keep)]
  phi = _features(head_dim)
  far_keys[0] = project_heads(key_kernel, far_keys[0], far_keys[2])
  queries = rows(project_heads(query_kernel, query), kv_heads, count)
  far, sums = chunk_sums(
    False, far, phi(queries), key_features(phi, far_keys, count)
  )
  # The window of each chunk, `[B, K, 1, G, W+C, ·]`.
  position = jnp.arange(window + size)
  if count > 1:
    # A key is in several windows, over which its gradient is summed in float32.
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    key, value, keep = (
      layout.tiles(x, size, window + size).reshape(x.shape[0], -1, *x.shape[2:])
      for x in (key, value, keep)
    )
  identity = FeatureMap(lambda x: x, head_dim)
  key, value = key_features(identity, (key, value, keep), count)
  # Query i of a chunk is at position W + i.
  age = window + jnp.arange(size)[:, None] - position[None, :]
  is_near = jnp.swapaxes(rows(keep[..., None, None], 1, count), -1, -2)
  is_near &= ((age >= 0) & (age < window))[None, None, None, None]
  query_rows = rows(query.astype(jnp.float32), kv_heads, count)
  logits = scale * jnp.einsum("...ch,...sh->...cs", query_rows, key)
  logits = jnp.where(is_near, logits, -1e30)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  exponentials = jnp.exp(jnp.where(is_near, logits - largest, -jnp.inf))
  near = jnp.einsum("...cs,...sx->...cx", exponentials, value)
  out = normalize(gamma.reshape(1, kv_heads, -1, 1, 1, 1) * near + sums.sums)
  near = tuple(x[:, length:] for x in keys)
  return (near, far), join_rows(out).astype(query.dtype)


class WindowLinearCache(NamedTuple):
  """The last R = min(W, max_length) keys, and the sums over the earlier ones.

  Attributes:
    key: `[B, R, K, H]`, the oldest first.
    value: `[B, R, K, V]`.
    index: `[B]`, the number of positions seen.
    far: Σ φ(k) (v, 1), float32.
  """

  key: Float[Array, "B R K H"]
  value: Float[Array, "B R K V"]
  index: Int[Array, "B"]
  far: Scaled


@attention_factory
def window_linear(window: int = 64) -> Attention:
  """The mechanism of `window_linear_attention`.

  Args:
    window: W, the number of keys with softmax attention, including the query's own.
      The default is the paper's.

  Returns:
    An `Attention` with trained `query_kernel [N, H, H]` and `key_kernel [K, H, H]`,
    initially the identity, and `mix [N]`, initially the logit of 0.1. It decodes with
    the last W keys and values and a state of K·2H·(H+1) numbers per example.

  Raises:
    ValueError: `window` < 1; by `init`, the window covers the longest sequence.
  """

  def init(key, dims):
    del key
    if window >= dims.max_length:
      raise ValueError(
        f"window: {window} covers all {dims.max_length} positions, which is "
        "dense attention; choose a smaller one or use dense"
      )
    first = math.log(_INITIAL_GAMMA / (1.0 - _INITIAL_GAMMA))
    mix = jnp.full(dims.num_heads, first, jnp.float32)
    return {"params": {**identity_kernels(dims), "mix": mix}}

  def options(variables):
    return {"window": window, **variables["params"]}

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    size, heads = min(window, max_length), dims.num_kv_heads
    return WindowLinearCache(
      jnp.zeros((batch, size, heads, dims.head_dim), dtype),
      jnp.zeros((batch, size, heads, dims.values), dtype),
      jnp.zeros(batch, jnp.int32),
      empty_state(batch, heads, _features(dims.head_dim), dims.values),
    )

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del query, scale
    size, phi = cache.key.shape[1], _features(key.shape[-1])
    position = lengths[:, None] - size + jnp.arange(size)[None]
    is_set = (position >= 0)[..., None, None]

    def last(x):
      x = jnp.where(is_set, layout.rows_at(x, jnp.maximum(position, 0)), 0)
      return x.astype(cache.key.dtype)

    is_far = jnp.arange(key.shape[1])[None] < lengths[:, None] - size
    far = project_heads(variables["params"]["key_kernel"], key), value, is_far
    return WindowLinearCache(
      last(key),
      last(value),
      lengths.astype(cache.index.dtype),
      update_state(phi, cache.far, far),
    )

  def decode(variables, cache, query, key, value, *, scale=None):
    size = cache.key.shape[1]
    is_set = jnp.arange(size)[None] >= size - cache.index[:, None]
    is_set = is_set.astype(jnp.float32)
    state = (cache.key, cache.value, is_set), cache.far
    key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    xs = query, key, value, jnp.ones((key.shape[0], 1))
    params = _params(query, **variables["params"], scale=scale)
    ((keys, values, _), far), out = _step(1, size, params, state, xs)
    return out, WindowLinearCache(keys, values, cache.index + 1, far)

  return Attention(
    init=init,
    apply=make_apply("window_linear", window_linear_attention, options),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset({"causal", "cross", "mask", "decode", "sequence"}),
    approximates="dense",
    cost="linear",
    causal_only=True,
    sizes=Hyperparameters(
      short={"window": 8},
      timed=lambda length: {"window": min(256, length // 2)},
    ),
  )
