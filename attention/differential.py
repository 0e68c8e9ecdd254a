"""Differential attention: the difference of two softmaxes (Ye et al., 2024)."""

import dataclasses
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import decode as decode_dense
from attention.dense import dense
from attention.mechanism import Attention
from attention.softmax import own_logits
from attention.softmax.cache import DenseCache
from attention.softmax.cache import init_cache as init_dense
from attention.softmax.cache import prefill as prefill_dense
from attention.softmax.logits import Logits
from attention.softmax.rows import Output
from attention.softmax.sharding import attend_to_shards
from attention.softmax.tiles import attend
from attention.softmax.visible import (
  EVERY_PAIR,
  Visible,
  VisibleOptions,
  mask_mod,
)


@attention_function
def differential_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  weight: Float[Array, ""] | float,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | tuple[int, int] | None = None,
  axis_name: str | None = None,
  visible: Visible = EVERY_PAIR,
  return_lse: bool = False,
  **pairs: Unpack[VisibleOptions],
) -> Output | tuple[Array, tuple[Array, Array]]:
  """Subtracts λ times the attention of one half of each head from that of the other.

    out = differential_attention(q, k, v, weight=0.8, is_causal=True)

    (softmax(scale · Q₁ K₁ᵀ) − λ softmax(scale · Q₂ K₂ᵀ)) V

  where Q₁, K₁ are the first half of the features of each head and Q₂, K₂ the second.

  Args:
    query: `[B, T, N, H]`, H even.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    weight: λ.
    scale: factor of the logits; None means 1/√(H/2).
    block_size: (C, D), the queries and keys of a block, or one int for both.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees only keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.
    visible: the visible pairs, in addition to the other masking options.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; with `return_lse` also the log-sum-exps of
    both softmaxes, a pair of `[B, T, N]` in float32, with which the results of either
    softmax can be merged, but not those of the difference.

  Raises:
    ValueError: H is odd, or the arguments do not fit together.

  Cost: time T·S·N·(H + 2·V), half of it if causal; memory of `flash_attention` with
  2·N heads, and another copy of keys, values and results.

  Unlike the paper's layer, it does not apply the norm of each head's output and its
  factor 1 − λ_init, which belong to the model.

  Paper: Differential transformer, arXiv:2410.05258, equation 1.
  """
  sizes = checks.block_sizes(block_size)
  if not isinstance(weight, int | float | jax.Array | np.ndarray | np.number):
    raise ValueError(f"weight: expected a number, got {type(weight).__name__}")
  if query.shape[3] % 2:
    raise ValueError(
      "query: expected an even head dimension, to split each head into halves, got "
      f"{query.shape[3]}"
    )
  halves = _split_heads(query, key, value)
  visible = _repeat_heads(visible, query.shape[2])
  run: Any = attend
  if axis_name is not None:
    run = partial(attend_to_shards, axis_name=axis_name)
  out, lse = run(*halves, visible, Logits(scale=scale), block=sizes)
  out = _difference(out, weight)
  first, second = jnp.split(lse, 2, axis=2)
  return (out, (first, second)) if return_lse else out


def _repeat_heads(visible: Visible, num_heads: int) -> Visible:
  """Repeats the head axis of `visible` for the second halves."""

  def repeat(mod):
    return mask_mod(lambda b, n, t, s: mod(b, n % num_heads, t, s)).mods[0]

  return dataclasses.replace(
    visible,
    masks=tuple(
      x if x.shape[1] == 1 else jnp.concatenate([x, x], 1)
      for x in visible.masks
    ),
    mods=tuple(map(repeat, visible.mods)),
  )


def _split_heads(
  query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
  """Splits each head into two: `[B, T, 2N, H/2]`, with the values repeated."""
  query, key = (
    jnp.concatenate(jnp.split(x, 2, axis=3), axis=2) for x in (query, key)
  )
  return query, key, jnp.concatenate([value, value], axis=2)


def _difference(out: Array, weight: Array | float) -> Array:
  first, second = jnp.split(out, 2, axis=2)
  difference = first - weight * second.astype(jnp.float32)
  return difference.astype(out.dtype)


class HalfHeadCache(DenseCache):
  """The halves of each key head, and twice the values of each head."""

  __slots__ = ()
  rows_per_head = 2


@attention_factory
def differential(start: float = 0.8) -> Attention:
  """The mechanism of `differential_attention`.

    λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init

  Args:
    start: λ_init. The paper uses 0.8 − 0.6 · e^(−0.3 (l − 1)) in layer l, and reports
      that 0.8 in all layers works equally well.

  Returns:
    An `Attention` that decodes with the cache of dense attention. Its parameters are
    `query_1`, `key_1`, `query_2` and `key_2`, `[H/2]` each, drawn from N(0, 0.1²).

  Raises:
    ValueError: `start` is not between 0 and 1; by `init`, H is odd.

  The paper's model also has `output_norm='rms'`.
  """
  if not 0.0 <= start < 1.0:
    raise ValueError(f"start: expected [0, 1), got {start!r}")

  def init(key, dims):
    if dims.head_dim % 2:
      raise ValueError(
        "head_dim: expected an even number, to split each head into halves, got "
        f"{dims.head_dim}"
      )
    names = ("query_1", "key_1", "query_2", "key_2")
    keys = jax.random.split(key, len(names))
    shape = (dims.head_dim // 2,)
    return {
      "params": {
        name: 0.1 * jax.random.normal(k, shape)
        for name, k in zip(names, keys, strict=True)
      }
    }

  def difference_weight(variables):
    p = variables["params"]
    first = jnp.exp(jnp.sum(p["query_1"] * p["key_1"]))
    return first - jnp.exp(jnp.sum(p["query_2"] * p["key_2"])) + start

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    half_heads = dims._replace(
      num_kv_heads=2 * dims.num_kv_heads,
      head_dim=dims.head_dim // 2,
      value_dim=dims.values,
    )
    return HalfHeadCache(*init_dense(batch, max_length, half_heads, dtype))

  def decode(variables, cache, query, key, value, *, scale=None):
    out, cache = decode_dense(
      cache, *_split_heads(query, key, value), scale=scale
    )
    return _difference(out, difference_weight(variables)), cache

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del variables, scale
    _, key, value = _split_heads(query, key, value)
    return HalfHeadCache(*prefill_dense(cache, key, value, lengths))

  return Attention(
    init=init,
    apply=make_apply(
      "differential",
      differential_attention,
      lambda variables: {"weight": difference_weight(variables)},
    ),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=dense().supports
    - own_logits.SUPPORTS
    - {"bias", "relative", "dropout"},
  )
