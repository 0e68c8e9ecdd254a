"""Differential attention: the difference of two softmaxes (Ye et al., 2024)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import arguments, plug
from attention.dense import decode as decode_dense
from attention.dense import init_cache as init_dense
from attention.dense import prefill as prefill_dense
from attention.flash import flash_attention
from attention.sharded import attention_in_parts


@arguments.attention_function()
def differential_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  weight: Float[Array, ""] | float,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  block_size: int | tuple[int, int] | None = None,
) -> Float[Array, "B T N V"]:
  """What one half of each head attends to, less λ times what the other does.

    (softmax(scale · Q₁ K₁ᵀ) − λ softmax(scale · Q₂ K₂ᵀ)) V

  where Q₁, K₁ are the first half of the features of a head and Q₂, K₂ the second.

  Args:
    query: `[B, T, N, H]`, H even.
    key: `[B, S, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K).
    value: `[B, S, K, V]`.
    weight: λ.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√(H/2).
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    block_size: (C, D), the queries and keys of a block, or one int for both.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: H is odd, or arguments do not fit together.

  Cost: time T·S·N·(H + 2·V), half of it if causal; memory of `flash_attention` with
  2·N heads, and keys, values and results twice.

  Departs from its paper in that the norm of each head's result, and the factor
  1 − λ_init of it, are left to the model.

  Paper: Differential transformer, arXiv:2410.05258, equation 1.
  """
  arguments.check_pairs(
    query,
    key,
    value,
    mask=mask,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
  if not isinstance(weight, int | float | jax.Array | np.ndarray | np.number):
    raise ValueError(f"weight: expected a number, got {type(weight).__name__}")
  if query.shape[3] % 2:
    raise ValueError(
      "query: expected an even head dimension, whose halves attend apart, got "
      f"{query.shape[3]}"
    )
  options: dict[str, Any] = {
    "mask": _of_both(mask),
    "is_causal": is_causal,
    "scale": scale,
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
    "block_size": block_size,
  }
  out: Any = flash_attention(*_halves(query, key, value), **options)
  return _difference(out, weight)


def _of_both(mask: Array | None) -> Array | None:
  """A mask for the heads of both halves."""
  if mask is None or mask.ndim != 4 or mask.shape[1] == 1:
    return mask
  return jnp.concatenate([mask, mask], axis=1)


def _halves(
  query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array]:
  """Both halves as heads: `[B, T, 2N, H/2]`, values twice."""
  query, key = (
    jnp.concatenate(jnp.split(x, 2, axis=3), axis=2) for x in (query, key)
  )
  return query, key, jnp.concatenate([value, value], axis=2)


def _difference(out: Array, weight: Array | float) -> Array:
  first, second = jnp.split(out, 2, axis=2)
  difference = first - weight * second.astype(jnp.float32)
  return difference.astype(out.dtype)


def differential(start: float = 0.8) -> plug.Attention:
  """The plug of `differential_attention`.

    λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init

  Args:
    start: λ_init. The paper has 0.8 − 0.6 · e^(−0.3 (l − 1)) in layer l, and finds
      0.8 everywhere as good.

  Returns:
    An `Attention` that decodes with the cache of dense attention. Its parameters are
    `query_1`, `key_1`, `query_2` and `key_2`, `[H/2]` each, drawn from N(0, 0.1²).

  Raises:
    ValueError: `start` is not between 0 and 1; by `init`, H is odd.

  Its model also has `output_norm='rms'`.
  """
  if not 0.0 <= start < 1.0:
    raise ValueError(f"start: expected [0, 1), got {start!r}")

  def init(key, dims):
    if dims.head_dim % 2:
      raise ValueError(
        "head_dim: expected an even one, whose halves attend apart, got "
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

  def weight_of(variables):
    p = variables["params"]
    first = jnp.exp(jnp.sum(p["query_1"] * p["key_1"]))
    return first - jnp.exp(jnp.sum(p["query_2"] * p["key_2"])) + start

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "differential", differential_attention, call, own=("weight",)
    )
    weight = weight_of(variables)
    return differential_attention(query, key, value, weight=weight, **call)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    call["mask"] = _of_both(call.get("mask"))
    halves = _halves(query, key, value)
    out = attention_in_parts(*halves, axis_name=axis_name, **call)
    return _difference(out, weight_of(variables))

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    twice = dims._replace(
      num_kv_heads=2 * dims.num_kv_heads,
      head_dim=dims.head_dim // 2,
      value_dim=dims.values,
    )
    return init_dense(batch, max_length, twice, dtype)

  def decode(variables, cache, query, key, value, *, scale=None):
    halves = _halves(query, key, value)
    out, cache = decode_dense(cache, *halves, scale=scale)
    return _difference(out, weight_of(variables)), cache

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del variables, scale
    halves = _halves(query, key, value)
    return prefill_dense(cache, halves[1], halves[2], lengths)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply_sharded,
    supports=frozenset(
      {
        "causal",
        "cross",
        "rowwise",
        "mask",
        "full_mask",
        "segments",
        "decode",
        "sequence",
      }
    ),
  )
