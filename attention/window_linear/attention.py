"""Window and linear attention under one normaliser (Zhang et al., 2025).

This module checks arguments and has the formula. The near keys are read by
`sliding_window.near`, the far ones are summed by `linear.causal`, and `joint`
divides.
"""

from functools import partial
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, plug
from attention.core import platform, visibility
from attention.linear import causal, hedgehog
from attention.linear.features import FeatureMap, Operands
from attention.window_linear import cache, joint, parts
from attention.window_linear.near import window_with_total

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
    block_size: the queries of a tile of near keys, and of a chunk of far ones.
      It changes only the rounding of the result. None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. A query that sees no key gets zeros,
    and so does one that sees far keys only, with a normaliser under 1e-30.

  Raises:
    ValueError: arguments do not fit, the mask varies along queries, or
      `is_causal` is False.

  Cost, with tiles of C queries: time T·N·(H² + (W+C)·(H+V) + 2H·(H+V)), and
  S·K·H² for the keys. Memory in addition to the arguments and the result:
  B·T·N·(H+3V) and B·S·K·(H+V) float32, with gradients up to three times as
  much; and that of `sliding_window_attention` and of `linear_attention` with
  M = 2H, causal. Nothing is T×S, forward or backward.

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
  scaled, factor = arguments.scaled_query(query, scale)
  _check_causal(is_causal)
  length = query.shape[1]
  near, total = window_with_total(
    scaled,
    key,
    value,
    visibility.keys(keep),
    sides=(window - 1, 0),
    rows=block_size,
    scale=factor,
  )
  far = None
  if window < length:
    # The backward makes the projections again instead of keeping them: five
    # arrays of the size of query, key or value.
    made_again = jax.checkpoint(
      partial(_far, window=window, block_size=block_size),
      prevent_cse=platform.profile().needs_barriers,
    )
    far = made_again(query, key, value, query_kernel, key_kernel, keep)
  share = jax.nn.sigmoid(mix.astype(jnp.float32))[None, None, :, None]
  out = joint.average(share, near * total, total, far)
  return out.astype(query.dtype)


def _far(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  keep: Bool[Array, "B S"] | None,
  *,
  window: int,
  block_size: int | None,
) -> Float[Array, "B T N X"]:
  """Numerator and normaliser of the keys s ≤ t − W; 0 for the first W queries."""
  # Query t and the last far key t − W have the same place in these.
  past = slice(0, query.shape[1] - window)
  operands = Operands(
    hedgehog.through(query_kernel, query[:, window:]),
    hedgehog.through(key_kernel, key[:, past]),
    value[:, past],
    (),
  )
  far = causal.sums(
    FeatureMap(hedgehog.hedgehog_features, False, 2 * query.shape[-1]),
    operands,
    None if keep is None else keep[:, past],
    block_size,
  )
  return jnp.pad(far, ((0, 0), (window, 0), (0, 0), (0, 0)))


def _check_causal(is_causal: bool) -> None:
  """Checks that a call is causal.

  Raises:
    ValueError: it is not.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; window_linear attention is causal by "
      "definition; give is_causal=True, or take sliding_window or linear "
      "attention in both directions"
    )


def _check_variables(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  query_kernel: Float[Array, "N H H"],
  key_kernel: Float[Array, "K H H"],
  mix: Float[Array, "N"],
) -> None:
  """Checks the trained arrays.

  Raises:
    ValueError: a shape does not fit query and key.
  """
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


def window_linear(window: int = 64) -> plug.Attention:
  """The plug of `window_linear_attention`.

  Args:
    window: W, the number of keys with softmax attention, that of the query
      included. The default is the paper's.

  Returns:
    An `Attention` with trained `query_kernel [N, H, H]` and
    `key_kernel [K, H, H]`, the identity at first, and `mix [N]`, the logit of
    0.1 at first. It decodes with the last W keys and values and a state of
    K·2H·(H+1) numbers for each example.

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
    return {"params": {**hedgehog.identity_kernels(dims), "mix": mix}}

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "window_linear",
      window_linear_attention,
      call,
      own=("query_kernel", "key_kernel", "mix", "window"),
    )
    return window_linear_attention(
      query, key, value, window=window, **variables["params"], **call
    )

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    return cache.init_cache(window, batch, max_length, dims, dtype)

  def prefill(variables, state, query, key, value, lengths, *, scale=None):
    del query, scale
    kernel = variables["params"]["key_kernel"]
    return cache.prefill(state, key, value, lengths, key_kernel=kernel)

  def decode(variables, state, query, key, value, *, scale=None):
    params = variables["params"]
    return cache.decode(
      state,
      query,
      key,
      value,
      query_kernel=params["query_kernel"],
      key_kernel=params["key_kernel"],
      share=jax.nn.sigmoid(params["mix"].astype(jnp.float32)),
      scale=scale,
    )

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    arguments.check_qkv(query, key, value)
    call = arguments.accepted_options(
      "window_linear",
      window_linear_attention,
      call,
      own=("query_kernel", "key_kernel", "mix", "window"),
    )
    _check_causal(call.pop("is_causal", False))
    return parts.attention_in_parts(
      query,
      key,
      value,
      axis_name=axis_name,
      window=window,
      **variables["params"],
      **call,
    )

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
