"""Native sparse attention: compressed keys, selected blocks and a window."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import dense
from attention.flash import flash_attention
from attention.mechanism import Attention, Hyperparameters
from attention.platform import layout
from attention.platform.blocks import pad
from attention.recurrent import gates
from attention.recurrent.features import visible_keys
from attention.sliding_window import sliding_window_attention
from attention.softmax.block_selection import nsa_blocks
from attention.softmax.cache import append
from attention.softmax.cache import prefill as prefill_dense
from attention.softmax.selected_blocks import selected_attention
from attention.softmax.visible import key_mask, mask_mod

_INSTEAD = "nsa attention selects blocks for each query; give a key mask"


@attention_function
def nsa_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  branch_gates: Float[Array, "B T N 3"],
  key_weights: Float[Array, "K C"],
  value_weights: Float[Array, "K C"],
  stride: int = 16,
  block_size: int = 64,
  num_blocks: int = 16,
  window: int = 512,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
  """The gated sum of attention to compressed keys, to selected blocks and to a window.

    out = nsa_attention(q, k, v, branch_gates=g, key_weights=w, value_weights=u)

    k'_i = Σ_j w_j k_{i·d+j}        v'_i = Σ_j u_j v_{i·d+j}        j < C
    p_t = softmax over i with i·d + C ≤ t + 1 of (scale · q_t · k'_i)
    out_t = g_1 Σ_i p_ti v'_i + g_2 selected(q_t) + g_3 windowed(q_t)

  with d = `stride`. The second branch attends to `num_blocks` blocks of `block_size`
  keys, the same for all query heads of a key head: the first of the sequence, the
  query's own and the one before it, and the blocks m of largest Σ_i p_ti o_im over
  these heads, where o counts the strides that compressed block i and block m share. Of
  blocks with equal scores, the earlier ones are selected. The third branch attends to
  the last `window` keys.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    branch_gates: g, the gates of the three branches.
    key_weights: w, the weights of the C positions of a compressed block.
    value_weights: u.
    stride: d, a divisor of C and of `block_size`.
    block_size: the number of keys in a selected block.
    num_blocks: the number of blocks of a query, including the three fixed ones.
    window: the number of keys in the window, including the query's own.
    mask: key mask, `[B, 1, 1, T]`; masked keys are zeros in a compressed key.
    is_causal: must be True, because blocks are selected among the past.
    scale: factor of the logits; None means 1/√H.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, 0 at masked positions. The selection of
    blocks has no gradient.

  Raises:
    ValueError: `num_blocks` is below 3, the mask varies along queries, or
      `is_causal` is False.

  Cost: time T·N·(H+V)·(T/d + num_blocks·block_size + window), on accelerators
  T·(T/block_size)·K·num_blocks more; memory linear in T.

  Differs from the paper in that the three branches share keys and values, and in that
  compression is a learned weighted sum instead of an MLP, which keeps the output linear
  in the values. Position encodings within a block would only add a constant
  to all compressed keys.

  Paper: Native sparse attention, arXiv:2502.11089.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; nsa compresses past keys; use "
      "selected_attention with your own blocks"
    )
  size = key_weights.shape[1]
  _check_sizes(num_blocks, stride, key_weights=size, block_size=block_size)
  keep = visible_keys(mask, query, key, _INSTEAD)
  positions = jnp.broadcast_to(jnp.arange(query.shape[1])[None], keep.shape)
  return _attend(
    (query, key, value),
    keep,
    positions,
    jnp.where(keep[..., None, None], branch_gates, 0.0),
    (key_weights, value_weights),
    (size, stride, block_size, num_blocks),
    visible=mask_mod(lambda b, n, t, s: s * stride + size - 1 <= t),
    window_output=sliding_window_attention(
      query, key, value, window=(window - 1, 0), mask=mask, scale=scale
    ),
    is_causal=True,
    scale=scale,
  )


def _check_sizes(num_blocks, stride, **multiples):
  checks.check_at_least("num_blocks", num_blocks, 3)
  for name, multiple in multiples.items():
    if multiple % stride:
      raise ValueError(
        f"stride: expected a divisor of the {multiple} positions of {name}, got "
        f"{stride}"
      )


def _attend(
  qkv,
  keep,
  positions,
  branch_gates,
  weights,
  sizes,
  *,
  visible,
  window_output,
  **options,
):
  """The gated sum of the three branches.

  Args:
    qkv: query, key and value.
    keep: the unmasked keys, `[B, S]`.
    positions: the positions of the queries, `[B, T]`.
    branch_gates: `[B, T, N, 3]`.
    weights: the compression weights of keys and values.
    sizes: C, d, `block_size`, `num_blocks`.
    visible: the visible compressed keys.
    window_output: the output of the third branch.
    **options: `is_causal`, for the selected keys, and `scale`.
  """
  query, key, value = qkv
  scale, block_size = options["scale"], sizes[2]
  *compressed, has_keys = _compress(key, value, keep, weights, sizes[1])
  total = -(-key.shape[1] // block_size)
  blocks = nsa_blocks(
    query, compressed[0], has_keys, positions, sizes, total, scale
  )
  branches: list[Any] = [
    flash_attention(
      query, *compressed, visible=visible & key_mask(has_keys), scale=scale
    ),
    selected_attention(
      *qkv,
      block_indices=blocks,
      block_size=block_size,
      mask=keep[:, None, None],
      **options,
    ),
    window_output,
  ]
  branch_gates = branch_gates.astype(jnp.float32)
  out = sum(branch_gates[..., i, None] * x for i, x in enumerate(branches))
  return jnp.asarray(out).astype(query.dtype)


def _num_compressed(length, size, stride):
  """The number M of compressed keys, at least 1."""
  return max((length - size) // stride + 1, 1)


def _compress(key, value, keep, weights, stride):
  """Compressed keys `[B, M, K, H]`, values, and whether each has an unmasked key.

  Fewer than C positions give one block, padded with zeros, which no query sees.
  """
  key_weights, value_weights = weights
  size = key_weights.shape[1]
  count = _num_compressed(key.shape[1], size, stride)
  length = (count - 1) * stride + size

  def mix(x, weights):
    """Σ_j w_j x_{i·d+j}, as a sum over the strides of a block."""
    x = pad(x[:, :length], max(length - x.shape[1], 0)).astype(jnp.float32)
    strides = x.reshape(x.shape[0], -1, stride, *x.shape[2:])
    weights = weights.reshape(weights.shape[0], -1, stride)
    products = [
      layout.dot("kd,bmdkh->bmkh", weights[:, r], strides[:, r : r + count])
      for r in range(weights.shape[1])
    ]
    return functools.reduce(jnp.add, products)

  key, value = (layout.zero_masked(x, keep) for x in (key, value))
  ones = jnp.ones_like(key_weights[:1])
  has_keys = mix(keep[..., None, None], ones)[..., 0, 0] > 0
  compressed = mix(key, key_weights).astype(key.dtype)
  return compressed, mix(value, value_weights).astype(value.dtype), has_keys


@attention_factory
def nsa(
  compress_size: int = 32,
  stride: int = 16,
  block_size: int = 64,
  num_blocks: int = 16,
  window: int = 512,
) -> Attention:
  """The mechanism of `nsa_attention`, with g = sigmoid(x_t · W) for each head.

  Args:
    compress_size: C.
    stride: d.
    block_size: the number of keys in a selected block.
    num_blocks: the number of blocks of a query: three are fixed, the others selected.
    window: the number of keys in the window.

  Returns:
    A causal `Attention` with `gates`, that decodes with a `DenseCache`. Each
    decoded position compresses all S keys again. Its parameters are
    `gate_kernel [F, N, 3]`, and `key_weights` and `value_weights [K, C]`, initially
    1/C.

  Raises:
    ValueError: an argument is not a positive int, `num_blocks` is below 3, or
      `stride` does not divide `compress_size` and `block_size`.

  In the paper, an MLP computes g.
  """
  sizes = compress_size, stride, block_size, num_blocks
  _check_sizes(
    num_blocks, stride, compress_size=compress_size, block_size=block_size
  )
  options = {
    "stride": stride,
    "block_size": block_size,
    "num_blocks": num_blocks,
    "window": window,
  }
  attend = make_apply("nsa", nsa_attention, lambda x: weights(x) | options)

  def init(key, dims):
    checks.check_features("nsa", dims.features)
    mean = jnp.full((dims.num_kv_heads, compress_size), 1.0 / compress_size)
    return {
      "params": {
        "gate_kernel": gates.kernel(key, dims.features, dims.num_heads, 3),
        "key_weights": mean,
        "value_weights": mean,
      }
    }

  def branch_gates(variables, inputs):
    x = gates.project(inputs, variables["params"]["gate_kernel"])
    return {"branch_gates": jax.nn.sigmoid(x)}

  def weights(variables):
    names = "key_weights", "value_weights"
    return {name: variables["params"][name] for name in names}

  def apply(variables, query, key, value, **call):
    gates.check_gates("nsa", call, "branch_gates")
    return attend(variables, query, key, value, **call)

  def decode(variables, cache, query, key, value, *, branch_gates, scale=None):
    index, cache = cache.index[:, None], append(cache, key, value)
    positions = jnp.arange(cache.key.shape[1])[None]
    count = _num_compressed(positions.size, compress_size, stride)
    ends = jnp.arange(count)[None] * stride + compress_size - 1
    out = _attend(
      (query, cache.key, cache.value),
      positions <= index,
      index,
      branch_gates,
      weights(variables).values(),
      sizes,
      visible=key_mask(ends <= index),
      window_output=flash_attention(
        query,
        cache.key,
        cache.value,
        visible=key_mask((positions <= index) & (positions > index - window)),
        scale=scale,
      ),
      is_causal=False,
      scale=scale,
    )
    return out, cache

  def prefill(
    variables, cache, query, key, value, lengths, *, branch_gates, scale=None
  ):
    del variables, query, branch_gates, scale  # The cache stores plain keys.
    return prefill_dense(cache, key, value, lengths)

  return Attention(
    init=init,
    apply=apply,
    init_cache=dense().init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset({"causal", "mask", "decode"}),
    approximates="dense",
    causal_only=True,
    gates=branch_gates,
    sizes=Hyperparameters(
      short={
        "compress_size": 8,
        "stride": 4,
        "block_size": 8,
        "num_blocks": 4,
        "window": 8,
      },
    ),
  )
