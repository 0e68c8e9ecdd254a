"""Attention functions and mechanisms as the `attention_fn` of Flax's modules.

    fn = as_attention_fn(sliding_window_attention, window=64, is_causal=True)
    linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=fn)
    nnx.MultiHeadAttention(8, 512, attention_fn=fn, decode=False, rngs=rngs)

The result is a plain function; this file does not need Flax.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attention.mechanism import Attention, Dims, Variables, accepted_options
from attention.softmax import dropout
from attention.weights import attention_weights


def as_attention_fn(
  attention: Attention | Callable[..., Any],
  variables: Variables | None = None,
  **options: Any,
) -> Callable[..., Array]:
  """Converts a function or a mechanism to an `attention_fn` for Flax's modules.

      fn = as_attention_fn(sliding_window_attention, window=64, is_causal=True)
      linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=fn)
      nnx.MultiHeadAttention(8, 512, attention_fn=fn, decode=False, rngs=rngs)

  The linen and nnx modules pass their mask, dropout, dtype, … to the `attention_fn`;
  linen omits arguments that its signature does not name. The result names all of them,
  and honours each or raises:

  - `mask`, of any dtype (nonzero = attend), is passed to `attention`. A mechanism
    that accepts only a key mask rejects the result of `make_attention_mask`, which
    varies along T: give the module `mask=key_mask[:, None, None, :]`.
  - Several leading axes are merged into one batch axis, and restored in the result.
  - `sow_weights=True` sows `attention_weights` without dropout, as Flax does.
  - Dropout is passed to a mechanism that supports it. With Flax's default
    `broadcast_dropout=True` all examples and heads drop the same pairs.
  - `precision` and Flax's einsum hooks raise.
  - One query over a longer input, as in the modules' cached decoding, raises
    if the query's position may matter: with `is_causal=True`, for an `Attention` that
    is not 'rowwise', and for every plain function. Decode with
    `as_attention_fn(dense())`: the cache's mask is causal.

  Args:
    attention: an `Attention`, or a function `fn(query, key, value, **options)`,
      which may be a `functools.partial` of one.
    variables: the variables of an `Attention`; None if it has none. They are constants
      of the result, which no module contains and no optimizer updates (Linformer's
      projections keep their initial values). `LinenAttention` and `NNXAttention` train
      them.
    **options: passed to `attention` in every call, such as `is_causal`, `scale`
      or `window`, but not the mask and dropout, which the module passes.

  Returns:
    `attention_fn(query [..., T, N, H], key [..., S, K, H],
    value [..., S, K, V], …) -> [..., T, N, V]`.

  Raises:
    ValueError: `options` has an argument that the module passes or that `attention`
      does not accept, `attention` is not a function, or `variables` are given for a
      function or missing for an `Attention`.

  Cost: that of `attention`; sowing the weights costs `attention_weights`.
  """
  bound, inner = dict(options), attention
  while isinstance(inner, functools.partial):
    bound, inner = {**inner.keywords, **bound}, inner.func
  for name in ("mask", "dropout_rate", "dropout_rng"):
    if name in bound:
      raise ValueError(
        f"{name}: expected no such option, got one; give it to the Flax module"
      )
  name = _name(attention)
  if isinstance(attention, Attention):
    if attention.gates is not None:
      raise ValueError(
        "attention: its gates are computed from the inputs of the layer, which Flax "
        "does not pass to an attention_fn; expected one without gates, such as "
        "attention.gates_from_keys(…), which computes them from the keys"
      )
    if variables is None:
      _check_no_variables(attention)
    positions_matter = "rowwise" not in attention.supports
    apply = functools.partial(attention.apply, variables or {})
  elif not callable(attention):
    raise ValueError(
      "attention: expected an Attention or a function of query, key and value, "
      f"got {type(attention).__name__}"
    )
  elif variables is not None:
    raise ValueError(
      f"variables: expected None for the function {name}, got some; pass its "
      "arrays as options, or an Attention"
    )
  else:
    accepted_options(name, attention, options)
    positions_matter = True

    def apply(*qkv, **call):
      return attention(*qkv, **accepted_options(name, attention, call))

  def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
  ) -> Array:
    for hook_name, hook in (
      ("precision", precision),
      ("qk_attn_weights_einsum", qk_attn_weights_einsum),
      ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
      if hook is not None:
        raise ValueError(
          f"{hook_name}: expected None, got {hook}; for the precision of products "
          "call it inside `with jax.default_matmul_precision(...)`"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    batch_shape = query.shape[:-3]
    for array_name, x in (("key", key), ("value", value)):
      if x.shape[:-3] != batch_shape:
        raise ValueError(
          f"{array_name}: expected leading axes {batch_shape}, like the query's, "
          f"got shape {x.shape}"
        )
    query, key, value = (
      x.astype(dtype).reshape(-1, *x.shape[-3:]) for x in (query, key, value)
    )
    call = dict(options)
    if is_causal:
      call["is_causal"] = True
    if mask is not None:
      call["mask"] = _merge_batch_axes("mask", mask != 0, batch_shape)
    if bias is not None:
      if "bias" in bound:
        raise ValueError(
          "bias: expected one, got one from as_attention_fn and one in the "
          "call; give their sum to as_attention_fn"
        )
      call["bias"] = _merge_batch_axes("bias", bias, batch_shape)
    causal = bool(call.get("is_causal"))
    if query.shape[1] == 1 < key.shape[1] and (causal or positions_matter):
      raise ValueError(
        f"query: expected as many positions as the key's {key.shape[1]}, got 1, "
        "whose position among them is unknown; for a module that decodes with a "
        "cache pass an Attention that supports 'rowwise', such as "
        "attention.dense(), without is_causal (the cache comes with a mask)"
      )
    if module is not None:
      qk = query, key
      if (
        force_fp32_for_softmax
      ):  # It always is; Flax then sows float32 weights.
        qk = (x.astype(jnp.float32) for x in qk)
      weights = attention_weights(apply, *qk, **call)
      weights = weights.reshape(*batch_shape, *weights.shape[1:])
      module.sow("intermediates", "attention_weights", weights)
    if dropout_rate > 0.0 and not deterministic:
      if broadcast_dropout:
        dropout_rng = dropout.shared(dropout_rng)
      call.update(dropout_rate=dropout_rate, dropout_rng=dropout_rng)
    out = apply(query, key, value, **call)
    if not hasattr(out, "reshape"):
      raise ValueError(
        f"attention: expected {name} to return one array, got a "
        f"{type(out).__name__}; leave out options such as return_lse and return_state"
      )
    return out.reshape(*batch_shape, *out.shape[1:])

  return attention_fn


def _name(attention: Any) -> str:
  """The name of a function, a partial's function, or another object's type."""
  while isinstance(attention, functools.partial):
    attention = attention.func
  return getattr(attention, "__name__", type(attention).__name__)


def _check_no_variables(attention: Attention) -> None:
  """Raises ValueError if an `Attention` has variables."""
  # Whether there are any does not depend on sizes.
  dims = Dims(
    num_heads=1, num_kv_heads=1, head_dim=4, max_length=2**16, features=4
  )
  try:
    shapes = jax.eval_shape(
      lambda key: attention.init(key, dims), jax.random.key(0)
    )
  except ValueError:  # These sizes are invalid for it, so a call checks.
    return
  names = [
    f"{collection}.{name}"
    for collection, arrays in shapes.items()
    for name in arrays
  ]
  if names:
    raise ValueError(
      f"variables: expected {', '.join(names)} of this Attention, got None; give "
      "mechanism.init(jax.random.key(0), Dims(num_heads, num_kv_heads, head_dim, "
      "max_length)) as the second argument"
    )


def _merge_batch_axes(
  name: str, array: Array, batch_shape: tuple[int, ...]
) -> Array:
  """Merges the leading axes into one, of size 1 if all of them have size 1."""
  missing = len(batch_shape) + 3 - array.ndim
  shape = (1,) * missing + array.shape
  batch, rest = shape[: len(batch_shape)], shape[len(batch_shape) :]
  if missing < 0 or any(
    got not in (1, full) for got, full in zip(batch, batch_shape, strict=True)
  ):
    raise ValueError(
      f"{name}: expected leading axes {batch_shape} like the query's, or 1 or none of "
      f"them, before [N, T, S], got shape {array.shape}"
    )
  array = array.reshape(shape)
  if math.prod(batch) == 1:
    return array.reshape(1, *rest)
  return jnp.broadcast_to(array, (*batch_shape, *rest)).reshape(-1, *rest)
