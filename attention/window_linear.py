"""Softmax attention near the query and linear attention beyond, as one average.

One scan over chunks does both (Zhang et al., 2025): its state is the last W keys
before a chunk as they are, and the sums over the keys before these. The queries of a
chunk see the W keys and those of the chunk, each its own W of them, by a softmax; as
many keys leave the window as come, and they are the chunk of linear attention.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, halo, platform, plug
from attention.features import (
  CHUNK,
  FeatureMap,
  Scaled,
  chunk_sums,
  divided,
  empty,
  fitted,
  key_rows,
  rows,
  state_after,
  state_before,
  unrows,
)
from attention.linear import hedgehog_features, identity_kernels, through
from attention.scan import scan

_FIRST_SHARE = 0.1
"""γ before training, as in the configs of the paper's code."""


@arguments.attention_function()
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
) -> Float[Array, "B T N V"]:
  """Softmax attention to the last W keys and linear attention to all before.

    out_t = (γ Σ_near e^(x_ts − m_t) v_s + Σ_far φ(q_t)·φ(k_s) v_s)
            / (γ Σ_near e^(x_ts − m_t) + Σ_far φ(q_t)·φ(k_s))
    near: t − W < s ≤ t    far: s ≤ t − W
    x_ts = scale · q_t·k_s    m_t = max_near x_ts    γ = sigmoid(mix)
    φ(q_t) = [softmax(q_t W_q), softmax(−q_t W_q)], and φ(k_s) alike with W_k

  It is one average under one normaliser. The far keys are added to exponentials
  whose largest is 1, so m_t is a part of the definition, and gradients flow
  through it. The content of a masked key changes nothing, m_t included.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K). Positions of query and key are aligned at the start.
    value: `[B, S, K, V]`.
    query_kernel: W_q `[N, H, H]`, features of the query first.
    key_kernel: W_k `[K, H, H]`.
    mix: `[N]`, the logit of γ.
    window: W ≥ 1, the number of near keys, that of the query included: those
      of `sliding_window_attention` with `window=(W - 1, 0)`.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: must be True, because the mechanism is causal by definition.
    scale: factor of the near logits; None is 1/√H. It leaves φ as it is.
    block_size: C, the positions of a chunk, which is raised to a power of two. It
      changes only the rounding of the result. None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. A query that sees no key gets zeros,
    and so does one that sees far keys only, with a normaliser under 1e-30.

  Raises:
    ValueError: arguments do not fit, the mask varies along queries, or
      `is_causal` is False.

  Cost: time T·N·(H² + (W+2C)·(H+V) + 2H·(H+V)), and S·K·H² for the keys. Memory in
  addition to the arguments and the result: one chunk, and with gradients those of the
  arguments, and W keys and values and a state of 2H·V numbers per head for each
  chunk. Nothing is T×S, forward or backward.

  Departs from its paper in masks, which the paper does not discuss, and in one
  W_k for each key head, where the paper's code has one for each query head. γ
  is any number in the paper; here it is a sigmoid, as in the paper's code. That
  code cuts windows at multiples of W ("terraced", W to 2W keys) as well as
  sliding them as in the paper's formula, which is followed here. It keeps
  features above 1e-12, so that none vanishes; here they may.

  Paper: LoLCATs: on low-rank linearizing of large language models, section 3.2,
  arXiv:2410.10254. The features are those of Hedgehog, arXiv:2402.04347.
  """
  arguments.check_qkv(query, key, value)
  keep = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  _check_variables(query, key, query_kernel, key_kernel, mix)
  arguments.check_at_least("window", window, 1)
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  _check_causal(is_causal)
  if keep is None:
    keep = jnp.ones(key.shape[:2], bool)
  params = _params(query, query_kernel, key_kernel, mix, scale)
  keys = fitted((key, value, keep), query.shape[1])
  return _attend(params, query, keys, None, window, block_size)


class _State(NamedTuple):
  """Keys, values and mask of W positions, and the sums over those before."""

  near: tuple[Array, ...]
  far: Any


def _features(head_dim: int) -> FeatureMap:
  return FeatureMap(hedgehog_features, 2 * head_dim)


def _params(query, query_kernel, key_kernel, mix, scale):
  """What every step reads: W_q, W_k, γ and the scale."""
  scale = arguments.softmax_scale(scale, query.shape[-1])
  share = jax.nn.sigmoid(mix.astype(jnp.float32))
  return query_kernel, key_kernel, share, jnp.float32(scale)


def _attend(params, query, keys, state, window, block_size=None):
  """The scan; without a state, the sequence begins here."""
  batch, length, num_heads, head_dim = query.shape
  kv_heads, value_dim = keys[1].shape[2:]
  is_empty = state is None
  if state is None:
    window = min(window, length)
    near = (
      jnp.zeros_like(x, shape=(batch, window, *x.shape[2:])) for x in keys
    )
    far = empty(batch, kv_heads, _features(head_dim), value_dim)
    state = _State(tuple(near), far)
  size = min(block_size or CHUNK, length)
  size = 1 << (size - 1).bit_length()
  numbers = 2 * size + window + 4 * head_dim + 2 * value_dim
  numbers += (window + size) // size * (head_dim + value_dim)
  count = -(-length // size)
  at_once = platform.tiles_at_once(
    4 * batch * size * num_heads * numbers, count
  )
  at_once = -(-count // -(-count // at_once))
  step = functools.partial(_step, at_once, window)
  size *= at_once
  return scan(
    step, params, state, (query, *keys), size=size, is_empty=is_empty
  )[1]


def _step(count, window, params, state, xs):
  """`count` chunks of queries and keys."""
  query_kernel, key_kernel, share, scale = params
  query, *keys = xs
  batch, length, _, head_dim = query.shape
  kv_heads, size = keys[0].shape[2], length // count
  if state is None:
    near = [jnp.zeros((batch, window, *x.shape[2:]), x.dtype) for x in keys]
    state = _State(tuple(near), None)
  key, value, keep = keys = [
    jnp.concatenate(x, axis=1) for x in zip(state.near, keys, strict=True)
  ]
  # Keys that leave the window.
  phi = _features(head_dim)
  left = (
    through(key_kernel, key[:, :length]),
    value[:, :length],
    keep[:, :length],
  )
  far, sums = chunk_sums(
    False,
    state.far,
    phi((), rows(through(query_kernel, query), kv_heads, count)),
    *key_rows(phi, (), left, count),
  )
  # The window of each chunk, `[B, K, 1, G, W+C, ·]`.
  place = jnp.arange(window + size)
  if count > 1:
    places = size * jnp.arange(count)[:, None] + place[None, :]
    key, value, keep = (x[:, places.reshape(-1)] for x in (key, value, keep))
  identity = FeatureMap(lambda x: x, head_dim)
  key, value = key_rows(identity, (), (key, value, keep), count)
  # Query i of a chunk is at place W + i.
  age = window + jnp.arange(size)[:, None] - place[None, :]
  is_near = jnp.swapaxes(rows(keep[..., None, None], 1, count), -1, -2)
  is_near &= ((age >= 0) & (age < window))[None, None, None, None]
  query_rows = rows(query.astype(jnp.float32), kv_heads, count)
  logits = scale * jnp.einsum("...ch,...sh->...cs", query_rows, key)
  logits = jnp.where(is_near, logits, -1e30)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  exponentials = jnp.exp(jnp.where(is_near, logits - largest, -jnp.inf))
  near = jnp.einsum("...cs,...sx->...cx", exponentials, value)
  share = share.reshape(1, kv_heads, -1, 1, 1, 1)
  out = divided(share * near + sums.sums)
  state = _State(tuple(x[:, length:] for x in keys), far)
  return state, unrows(out).astype(query.dtype)


def _check_causal(is_causal: bool) -> None:
  """Raises ValueError for a call that is not causal."""
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; window_linear attention is causal by "
      "definition; give is_causal=True, or take sliding_window or linear "
      "attention in both directions"
    )


def _check_variables(query, key, query_kernel, key_kernel, mix) -> None:
  """Raises ValueError for a trained array that does not fit query and key."""
  num_heads, head_dim = query.shape[2:]
  kv_heads = key.shape[2]
  for name, array, letters, expected in (
    ("query_kernel", query_kernel, "N, H, H", (num_heads, head_dim, head_dim)),
    ("key_kernel", key_kernel, "K, H, H", (kv_heads, head_dim, head_dim)),
    ("mix", mix, "N", (num_heads,)),
  ):
    if array.shape != expected:
      raise ValueError(
        f"{name}: expected [{letters}] = {list(expected)}, got shape "
        f"{array.shape}"
      )


def _in_parts(
  query,
  key,
  value,
  *,
  axis_name,
  query_kernel,
  key_kernel,
  mix,
  window,
  mask=None,
  scale=None,
  block_size=None,
):
  """`window_linear_attention` of the whole, of which each device has a part.

  What crosses is W positions of keys and values, and log₂ D + 1 states of
  K·2H·(V+1) numbers.
  """
  keep = arguments.key_mask(
    mask, query, key, "a sequence in parts has no place for a T×S mask"
  )
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      "is_causal: expected parts of one length, got "
      f"{length} queries and {key.shape[1]} keys on a device"
    )
  keep = jnp.ones(key.shape[:2], bool) if keep is None else keep
  keys = key, value, keep
  reached = [halo.reached(x, window, 0, axis_name) for x in keys]
  phi, batch = _features(query.shape[-1]), len(query)
  # The keys that leave the windows of the devices before this one.
  key, left_value, left_keep = (x[:, :length] for x in reached)
  key = through(key_kernel, key)
  far = state_before(phi, (), key, left_value, left_keep, axis_name)
  if far is None:
    far = empty(batch, key.shape[2], phi, value.shape[3])
  state = _State(tuple(x[:, :window] for x in reached), far)
  params = _params(query, query_kernel, key_kernel, mix, scale)
  return _attend(params, query, keys, state, window, block_size)


class WindowLinearCache(NamedTuple):
  """The last R = min(W, max_length) keys, and the sums over those before.

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


def window_linear(window: int = 64) -> plug.Attention:
  """The plug of `window_linear_attention`.

  Args:
    window: W, the number of keys with softmax attention, that of the query
      included. The default is the paper's.

  Returns:
    An `Attention` with trained `query_kernel [N, H, H]` and
    `key_kernel [K, H, H]`, the identity at first, and `mix [N]`, the logit of
    0.1 at first. It decodes with the last W keys and values and a state of
    K·2H·(H+1) numbers for each example, in time N·H·(W+H) at every position.

  Raises:
    ValueError: `window` < 1; by `init`, a window that leaves no key for the
      linear part on the longest sequence.
  """
  arguments.check_at_least("window", window, 1)

  def init(key, dims):
    del key
    if window >= dims.max_length:
      raise ValueError(
        f"window: {window} has room for all {dims.max_length} positions, which "
        "is dense attention; choose less or use dense"
      )
    first = math.log(_FIRST_SHARE / (1.0 - _FIRST_SHARE))
    mix = jnp.full(dims.num_heads, first, jnp.float32)
    return {"params": {**identity_kernels(dims), "mix": mix}}

  def accepted(call):
    return arguments.accepted_options(
      "window_linear",
      window_linear_attention,
      call,
      own=("query_kernel", "key_kernel", "mix", "window"),
    )

  def apply(variables, query, key, value, **call):
    return window_linear_attention(
      query,
      key,
      value,
      window=window,
      **variables["params"],
      **accepted(call),
    )

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    arguments.check_qkv(query, key, value)
    call = accepted(call)
    _check_causal(call.pop("is_causal", False))
    return _in_parts(
      query,
      key,
      value,
      axis_name=axis_name,
      window=window,
      **variables["params"],
      **call,
    )

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    size, heads = min(window, max_length), dims.num_kv_heads
    return WindowLinearCache(
      jnp.zeros((batch, size, heads, dims.head_dim), dtype),
      jnp.zeros((batch, size, heads, dims.values), dtype),
      jnp.zeros(batch, jnp.int32),
      empty(batch, heads, _features(dims.head_dim), dims.values),
    )

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del query, scale
    size, phi = cache.key.shape[1], _features(key.shape[-1])
    place = lengths[:, None] - size + jnp.arange(size)[None, :]

    def last(old, new):
      new = jax.vmap(lambda x, i: x[i])(new, jnp.maximum(place, 0))
      is_there = (place >= 0)[:, :, None, None]
      return jnp.where(is_there, new.astype(old.dtype), old)

    has_left = jnp.arange(key.shape[1])[None, :] < lengths[:, None] - size
    far = through(variables["params"]["key_kernel"], key)
    return WindowLinearCache(
      last(cache.key, key),
      last(cache.value, value),
      lengths.astype(cache.index.dtype),
      state_after(phi, (), cache.far, far, value, has_left),
    )

  def decode(variables, cache, query, key, value, *, scale=None):
    size = cache.key.shape[1]
    is_there = jnp.arange(size)[None, :] >= size - cache.index[:, None]
    state = _State((cache.key, cache.value, is_there), cache.far)
    key, value = key.astype(cache.key.dtype), value.astype(cache.value.dtype)
    xs = query, key, value, jnp.ones((len(key), 1), bool)
    params = _params(query, **variables["params"], scale=scale)
    (near, far), out = _step(1, size, params, state, xs)
    return out, WindowLinearCache(near[0], near[1], cache.index + 1, far)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply_sharded,
    supports=frozenset({"causal", "cross", "mask", "decode", "sequence"}),
    approximates="dense",
    cost="linear",
    causal_only=True,
    sizes=plug.Sizes(
      short={"window": 8},
      timed=lambda length: {"window": min(256, length // 2)},
    ),
  )
