"""Which kernel computes a recurrence: the chunks here (XLA) or jax-linear-attention.

What its kernels take was read in version 0.1.0, and they were compiled for an H100.
"""

import importlib
import importlib.metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import arguments, platform, sharded

Implementation = Literal["xla", "jla"]

_VERSIONS = {"jax-linear-attention": "0.1.0", "jax": "0.11.2"}
"""Mosaic's form for GPUs changes with every release of JAX."""

_SUPPORTS = {
  "simple_gla": "scalar_gate.supports_simple_gla",
  "gla": "gla.supports_gla",
  "deltanet": "gated_delta_rule.supports_delta_rule",
  "gated_deltanet": "gated_delta_rule.supports_gated_delta_rule",
  "kda": "kda.supports_kda",
  "gdn2": "gdn2.supports_gdn2",
  "rwkv7": "rwkv7.supports_rwkv7",
}
"""Kind of recurrence -> who says whether a kernel takes a call of it."""

_LEAST_DECAY = -30.0
"""The kernels subtract sums of 64 decays, which large ones would leave inexact; what
e^−30 leaves is less than float32 can add to what comes after."""


def recurrence(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T N H"],
  value: Float[Array, "B T N V"],
  *,
  log_decay: Float[Array, "B T N _"],
  decays: bool,
  beta: Float[Array, "B T N 1"] | None,
  erase_key: Float[Array, "B T N H"] | None,
  erase_gate: Float[Array, "B T N H"] | None,
  write_gate: Float[Array, "B T N V"] | None,
  **options: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """What a kernel gives for a call of `recurrent_attention`.

  Args:
    query: `[B, T, N, H]`.
    key: 0 at hidden positions, as all that follow.
    value: `[B, T, N, V]`.
    log_decay: with a last axis of 1 or H.
    decays: whether anything does.
    beta: as in `recurrent_attention`, as are the three that follow.
    erase_key: read before the decay.
    erase_gate: of channels of the key.
    write_gate: of channels of the value.
    **options: `dtype`, `scale`, `initial_state`, `segment_ids`, `axis_name`; see
      `_call`.

  Raises:
    ValueError: no kernel serves the call.
  """
  rate = jnp.ones((), jnp.float32) if beta is None else beta
  log_decay = jnp.maximum(log_decay, _LEAST_DECAY)
  if erase_key is not None:
    key = key * rate
    return moves(
      query,
      key,
      value if write_gate is None else value * write_gate,
      log_decay=log_decay,
      removal=-(erase_key if erase_gate is None else erase_key * erase_gate),
      replacement=key,
      **options,
    )
  gates = {"g": log_decay} if decays else {}
  of_channels = log_decay.shape[-1] > 1
  if erase_gate is not None or write_gate is not None:
    kind = "gdn2"
    gates["g"] = _channels(log_decay, key)
    gates["b"] = _channels(
      rate if erase_gate is None else rate * erase_gate, key
    )
    gates["w"] = _channels(
      rate if write_gate is None else rate * write_gate, value
    )
  elif beta is None:
    kind = "gla" if of_channels else "simple_gla"
  else:
    kind = "gated_deltanet" if gates else "deltanet"
    kind = "kda" if of_channels else kind
    gates["beta"] = beta
  return _call(kind, query, key, value, gates, **options)


def moves(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T N H"],
  value: Float[Array, "B T N V"],
  *,
  log_decay: Float[Array, "B T N _"],
  removal: Float[Array, "B T N H"],
  replacement: Float[Array, "B T N H"],
  **options: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """What a kernel gives for a call of `rwkv7_attention`; see `recurrence`.

  With `lower_bound`, at least −2.5, nothing in `log_decay` is below it, and a faster
  kernel takes the call.
  """
  log_decay = _channels(jnp.maximum(log_decay, _LEAST_DECAY), key)
  gates = {"w": log_decay, "a": removal, "b": replacement}
  return _call("rwkv7", query, key, value, gates, **options)


def _channels(gate: Array, like: Array) -> Array:
  """A gate with one number for each channel."""
  return jnp.broadcast_to(gate, like.shape)


def _call(
  kind: str,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T N H"],
  value: Float[Array, "B T N V"],
  gates: dict[str, Array],
  *,
  dtype: Any,
  scale: float | Float[Array, ""] | None,
  initial_state: Float[Array, "B N H V"] | None,
  segment_ids: Int[Array, "B T"] | None,
  axis_name: str | None,
  **more: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """Calls the kernel of a kind.

  Args:
    kind: of recurrence, as jla has it.
    query: `[B, T, N, H]`.
    key: `[B, T, N, H]`.
    value: `[B, T, N, V]`.
    gates: by jla's names; a last axis of 1 is of heads.
    dtype: that queries, keys and values came in, and which products have.
    scale: factor of the queries; None is 1/√H.
    initial_state: before the first position.
    segment_ids: where they change, the state begins anew.
    axis_name: of devices that have parts of the sequence.
    **more: options of the kernel.
  """
  scale = arguments.softmax_scale(scale, query.shape[-1])
  qkv = [x.astype(dtype) for x in (query, key, value)]
  gates = {
    name: gate[..., 0] if gate.shape[-1] == 1 else gate
    for name, gate in gates.items()
  }
  more |= {"initial_state": initial_state, "segment_ids": segment_ids}
  obstacle = _obstacle(kind, qkv, gates, more, scale, axis_name)
  if obstacle:
    raise ValueError(f"implementation: 'jla' {obstacle}; use 'xla' or None")
  out, state = importlib.import_module("jla.ops").linear_attention(
    kind,
    *qkv,
    **gates,
    **more,
    impl="mosaic_gpu",
    scale=float(scale),
    output_final_state=True,
  )
  return out.astype(query.dtype), state


def _obstacle(kind, qkv, gates, more, scale, axis_name) -> str:
  """Why no kernel serves a call; empty where one does."""
  if platform.name() != "gpu":
    return f"needs an H100 or H200, got {platform.name()}"
  for package, version in _VERSIONS.items():
    try:
      installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      return f"needs the package {package} {version}, which is not installed"
    if installed != version:
      return f"needs {package} {version}, got {installed}"
  if sharded.is_part(axis_name):
    return "cannot take a sequence in parts"
  if isinstance(scale, jax.core.Tracer):
    return "takes a scale that is a number, got a traced array"
  module, name = _SUPPORTS[kind].split(".")
  module = importlib.import_module(f"jla.ops.mosaic_gpu.{module}")
  if getattr(module, name)(*qkv, *gates.values(), **more):
    return ""
  return _refusal(kind, *qkv)


def _refusal(kind, query, key, value) -> str:
  """What of a call jla refuses."""
  del key
  device = jax.devices()[0]
  generation = getattr(device, "compute_capability", "none")
  if generation != "9.0":
    return (
      "needs an H100 or H200, of compute capability 9.0, where the program is "
      f"traced, got {device.platform} and {generation}"
    )
  if query.dtype != jnp.bfloat16:
    return f"takes bfloat16, got {query.dtype}"
  widths = query.shape[-1], value.shape[-1]
  if not {*widths} <= {64, 128}:
    return f"takes heads of 64 or 128 features, got {widths[0]} and {widths[1]}"
  features = query.shape[2] * widths[0]
  if features % 128 and kind in ("gla", "kda", "gdn2"):
    return (
      f"takes decays of channels where N·H is a multiple of 128, got {features}"
    )
  return f"has no {kind} for queries of shape {query.shape}"
