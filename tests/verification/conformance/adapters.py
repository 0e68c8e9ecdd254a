"""Adapts attention functions of other libraries to the laws.

    python -m attention.testing tests.verification.conformance.adapters:jla_kda

Each adapter calls the public function of its library. It computes gates of recurrences
from the keys, and scales keys of delta rules to length 1. `FUNCTIONS` pairs each name
with a label and with the distribution whose version the record names.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import os
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp

from attention.testing import Function
from attention.testing.modules import from_equinox, from_linen, from_nnx


class Entry(NamedTuple):
  """An attention function of a library.

  Attributes:
    label: the name of the function in its library.
    distribution: the name on PyPI.
    make: imports the library and returns the callable or the `Function`.
    documented: law -> the statement of the library's documentation.
  """

  label: str
  distribution: str
  make: Callable[[], Any]
  documented: Mapping[str, str] = MappingProxyType({})


def _decay(key):
  return -jax.nn.softplus(key[..., 0].astype(jnp.float32))


def _channel_decay(key):
  return -0.1 * jax.nn.softplus(key.astype(jnp.float32))


def _beta(key):
  return jax.nn.sigmoid(key[..., 1].astype(jnp.float32)).astype(key.dtype)


def _unit(key):
  return (key / jnp.linalg.norm(key, axis=-1, keepdims=True)).astype(key.dtype)


def _function(call, same, **renamed):
  """Returns a `Function` whose options have the laws' names or renamed ones."""
  return Function(call, names={x: x for x in same.split()} | renamed)


_PACKED = "segment_ids cu_seqlens initial_state scale"


def _jla_function(rule):
  """Adapts a rule of jax-linear-attention, which returns output and state."""
  return _function(rule, _PACKED, return_state="output_final_state")


def _jla(name, *gates, unit=True):
  from jla.ops import chunked

  rule = getattr(chunked, name)

  def call(query, key, value, **options):
    arrays = query, _unit(key) if unit else key, value
    return rule(*arrays, *(gate(key) for gate in gates), **options)

  return _jla_function(call)


def _jla_rwkv7():
  from jla.ops.rwkv7 import rwkv7

  def call(query, key, value, **options):
    erase_key = _unit(key)
    arrays = query, key, value, _channel_decay(key)
    return rwkv7(*arrays, -erase_key, 0.5 * erase_key, **options)

  return _jla_function(call)


def _jla_path():
  from jla.ops.path_attention import path_attention

  def call(query, key, value, **options):
    return path_attention(query, key, value, _unit(key), _beta(key), **options)

  return _function(call, "segment_ids scale")


def _ejkernel_attention():
  from ejkernel.kernels._xla.attention import attention

  def call(query, key, value, **options):
    return attention(query, key, value, dtype=query.dtype, **options)

  return _function(
    call,
    "bias",
    mask="attention_mask",
    scale="softmax_scale",
    is_causal="causal",
    window="sliding_window",
  )


def _ejkernel_gla():
  from ejkernel.kernels._xla.gla import recurrent_gla

  def call(query, key, value, return_state=False, **options):
    del return_state  # It always returns both.
    return recurrent_gla(query, key, value, _channel_decay(key), **options)

  same = "cu_seqlens initial_state return_state"
  return _function(call, same, scale="softmax_scale")


def _ejkernel_gated_delta():
  from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule

  def call(query, key, value, return_state=False, **options):
    del return_state  # It always returns both.
    gates = _beta(key), _decay(key)
    return gated_delta_rule(query, key, value, *gates, **options)

  same = "initial_state return_state"
  return _function(call, same, segment_ids="seg_ids")


def _tokamax():
  import tokamax

  return functools.partial(
    tokamax.dot_product_attention, implementation="xla_chunked"
  )


def _dew():
  from dew.nn.attention import scaled_dot_product_attention

  return scaled_dot_product_attention


def _fa4():
  from fa4_jax import flash_attn

  return functools.partial(flash_attn, backend="reference")


def _rwkv_ops():
  import rwkv_ops

  def call(query, key, value, **options):
    erase_key = _unit(key)
    decay = jnp.exp(_channel_decay(key)).astype(key.dtype)
    arrays = query, decay, key, value, -erase_key, 0.5 * erase_key
    return rwkv_ops.generalized_delta_rule(*arrays, **options)

  return _function(call, "initial_state", return_state="output_final_state")


def _mamba3():
  from mamba3_jax import ssd_forward

  def call(query, key, value, *, initial_state=None, return_state=False):
    beta = _beta(key)
    out, state = ssd_forward(
      value,
      query,
      key,
      _decay(key),
      beta,
      beta * jnp.sum(query * key, axis=-1),
      jnp.zeros((value.shape[2],), value.dtype),
      chunk_size=64,
      initial_states=None if initial_state is None else initial_state[:, None],
      return_final_states=return_state,
    )
    return (out, state) if return_state else out

  return call


def _maxtext():
  import maxtext
  from maxtext.configs import pyconfig
  from maxtext.layers.attention_op import AttentionOp

  base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
  config = pyconfig.initialize(
    ["", base],
    enable_checkpointing=False,
    skip_jax_distributed_system=True,
    attention="dot_product",
    dtype="float32",
    matmul_precision="highest",
  )
  axes = tuple(config.mesh_axes)

  def call(query, key, value, *, segment_ids=None):
    attend = AttentionOp(
      config,
      jax.make_mesh((1,) * len(axes), axes),
      attention_kernel="dot_product",
      max_target_length=query.shape[1],
      num_query_heads=query.shape[2],
      num_kv_heads=key.shape[2],
      dtype=query.dtype,
    )
    positions = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    return attend(query, key, value, segment_ids, positions, "train")

  return call


def _keras(name, **sizes):
  import keras

  layer = getattr(keras.layers, name)(**sizes)
  layer.build((2, 5, 32), (2, 5, 32))

  def call(query, key, value, *, mask=None, is_causal=False):
    query, key, value = (x[:, :, 0] for x in (query, key, value))
    if mask is not None:
      mask = jnp.broadcast_to(
        mask[:, 0], (len(query), query.shape[1], key.shape[1])
      )
    out = layer(
      query, value, key, attention_mask=mask, use_causal_mask=is_causal
    )
    return out[:, :, None]

  return Function(call, num_heads=1, head_dim=32)


def _equinox():
  import equinox

  layer = equinox.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
  return from_equinox(layer, 32)


def _linen():
  from flax import linen

  return from_linen(linen.MultiHeadDotProductAttention(4), 32)


def _nnx():
  from flax import nnx

  module = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
  return from_nnx(module, 32)


def _import(path):
  """Returns the maker of a function that needs no adapter."""

  def make():
    module, _, name = path.partition(":")
    function = getattr(__import__(module, fromlist=[name]), name)
    return Function(function, path)

  return make


def _library(name, *gates, **options):
  import attention

  function = functools.partial(getattr(attention, name), **options)
  if not gates:
    return function

  def call(query, key, value, **options):
    gate_arrays = {x: gate(key) for x, gate in gates}
    if name != "gated_linear_attention":
      key = _unit(key)
    return function(query, key, value, **gate_arrays, **options)

  return _function(call, "mask segment_ids scale initial_state return_state")


_GDN = ("log_decay", _decay), ("beta", _beta)
_KDA = ("log_decay", _channel_decay), ("beta", _beta)
_LINEN_SOFTMAX = {
  "bfloat16": "`force_fp32_for_softmax=False`, the default, computes the softmax in "
  "the dtype of the inputs"
}

FUNCTIONS: dict[str, Entry] = {
  "dense": Entry(
    "dense_attention",
    "attention-laboratory",
    _import("attention:dense_attention"),
  ),
  "flash": Entry(
    "flash_attention",
    "attention-laboratory",
    _import("attention:flash_attention"),
  ),
  "sliding_window": Entry(
    "sliding_window_attention, window=4",
    "attention-laboratory",
    lambda: _library("sliding_window_attention", window=4),
  ),
  "gated_linear": Entry(
    "gated_linear_attention, decays of channels",
    "attention-laboratory",
    lambda: _library("gated_linear_attention", ("log_decay", _channel_decay)),
  ),
  "gated_delta": Entry(
    "delta_rule_attention, as Gated DeltaNet",
    "attention-laboratory",
    lambda: _library("delta_rule_attention", *_GDN),
  ),
  "kimi_delta": Entry(
    "delta_rule_attention, as KDA",
    "attention-laboratory",
    lambda: _library("delta_rule_attention", *_KDA),
  ),
  "jax_nn": Entry(
    "jax.nn.dot_product_attention",
    "jax",
    _import("jax.nn:dot_product_attention"),
  ),
  "linen_function": Entry(
    "linen.dot_product_attention",
    "flax",
    _import("flax.linen:dot_product_attention"),
    _LINEN_SOFTMAX,
  ),
  "nnx_function": Entry(
    "nnx.dot_product_attention",
    "flax",
    _import("flax.nnx:dot_product_attention"),
  ),
  "linen_module": Entry("linen.MultiHeadDotProductAttention", "flax", _linen),
  "nnx_module": Entry("nnx.MultiHeadAttention", "flax", _nnx),
  "keras_mha": Entry(
    "MultiHeadAttention (JAX backend)",
    "keras",
    lambda: _keras("MultiHeadAttention", num_heads=4, key_dim=8),
  ),
  "keras_gqa": Entry(
    "GroupQueryAttention (JAX backend)",
    "keras",
    lambda: _keras(
      "GroupQueryAttention",
      head_dim=8,
      num_query_heads=4,
      num_key_value_heads=2,
    ),
  ),
  "equinox_mha": Entry("nn.MultiheadAttention", "equinox", _equinox),
  "dew": Entry("nn.attention.scaled_dot_product_attention", "dewml", _dew),
  "tokamax": Entry("dot_product_attention, xla_chunked", "tokamax", _tokamax),
  "fa4": Entry("flash_attn, reference backend", "fa4-jax", _fa4),
  "ejkernel_attention": Entry("XLA attention", "ejkernel", _ejkernel_attention),
  "ejkernel_gla": Entry("XLA recurrent_gla", "ejkernel", _ejkernel_gla),
  "ejkernel_gated_delta": Entry(
    "XLA gated_delta_rule", "ejkernel", _ejkernel_gated_delta
  ),
  "jla_simple_gla": Entry(
    "chunked.simple_gla",
    "jax-linear-attention",
    lambda: _jla("simple_gla", _decay, unit=False),
  ),
  "jla_gla": Entry(
    "chunked.gla",
    "jax-linear-attention",
    lambda: _jla("gla", _channel_decay, unit=False),
  ),
  "jla_delta": Entry(
    "chunked.delta_rule",
    "jax-linear-attention",
    lambda: _jla("delta_rule", _beta),
  ),
  "jla_gated_delta": Entry(
    "chunked.gated_delta_rule",
    "jax-linear-attention",
    lambda: _jla("gated_delta_rule", _decay, _beta),
  ),
  "jla_kda": Entry(
    "chunked.kda",
    "jax-linear-attention",
    lambda: _jla("kda", _channel_decay, _beta),
  ),
  "jla_rwkv7": Entry("rwkv7", "jax-linear-attention", _jla_rwkv7),
  "jla_path": Entry("path_attention", "jax-linear-attention", _jla_path),
  "mamba3_jax": Entry("ssd_forward", "mamba3-jax", _mamba3),
  "maxtext": Entry(
    "AttentionOp, dot_product",
    "maxtext",
    _maxtext,
    {
      "bfloat16": "`float32_logits: false`, the default of its config, computes the "
      "softmax in the dtype of the inputs"
    },
  ),
  "rwkv_ops": Entry(
    "generalized_delta_rule, native (JAX backend)", "rwkv-ops", _rwkv_ops
  ),
}
"""Name -> entry, in the order of the page."""


def __getattr__(name: str) -> Any:
  """Makes an entry when its name is imported, which imports only its library."""
  if name not in FUNCTIONS:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  function = FUNCTIONS[name].make()
  path = f"{__name__}:{name}"
  if isinstance(function, Function):
    return dataclasses.replace(function, path=function.path or path)
  return Function(function, path)
