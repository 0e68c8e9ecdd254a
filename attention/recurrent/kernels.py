"""The kernels of jax-linear-attention, an alternative to the chunked form in XLA.

The checks describe version 0.1.0, compiled for an H100.
"""

import importlib
import importlib.metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import checks
from attention.platform import backend
from attention.recurrent.scan import is_sequence_sharded

Implementation = Literal["xla", "jla"]

_VERSIONS = {"jax-linear-attention": "0.1.0", "jax": "0.11.2"}
"""Required versions: the format of kernels changes with each release of JAX."""

_SUPPORTS = {
  "simple_gla": "scalar_gate.supports_simple_gla",
  "gla": "gla.supports_gla",
  "deltanet": "gated_delta_rule.supports_delta_rule",
  "gated_deltanet": "gated_delta_rule.supports_gated_delta_rule",
  "kda": "kda.supports_kda",
  "gdn2": "gdn2.supports_gdn2",
  "rwkv7": "rwkv7.supports_rwkv7",
}
"""Maps the kind of a recurrence to the predicate whether its kernel supports a call."""

_MIN_LOG_DECAY = -30.0
"""The smallest log decay: kernels subtract sums of logarithms, which strong decays
would make inexact, and a factor of e^−30 is negligible in float32."""


def recurrence(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T N H"],
  value: Float[Array, "B T N V"],
  log_decay: Float[Array, "B T N _"],
  *,
  decays: bool,
  beta: Float[Array, "B T N 1"] | None,
  erase_key: Float[Array, "B T N H"] | None,
  erase_gate: Float[Array, "B T N H"] | None,
  write_gate: Float[Array, "B T N V"] | None,
  replacement: Float[Array, "B T N H"] | None,
  lower_bound: float | None,
  **call: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """Computes `recurrent_attention` by a kernel, from the arrays of `prepare_arrays`.

  `decays` is whether the caller gave decays. `call` has `dtype`, the original dtype of
  queries, keys and values, and `scale`, `initial_state`, `segment_ids` and `axis_name`.
  Log decays are clipped to `lower_bound`; with a bound of at least −2.5, RWKV-7 uses a
  faster kernel.

  Raises:
    ValueError: no kernel supports the call.
  """
  rate = jnp.ones_like(log_decay[..., :1]) if beta is None else beta
  bound = _MIN_LOG_DECAY if lower_bound is None else lower_bound
  log_decay = jnp.maximum(log_decay, bound)
  if replacement is not None and erase_key is not None:
    if lower_bound is not None:
      call["lower_bound"] = lower_bound
    decay = jnp.broadcast_to(log_decay, key.shape)
    gates = {"w": decay, "a": -erase_key, "b": replacement}
    return _output("rwkv7", query, key, value, gates, **call)
  if erase_key is not None:
    # RWKV-7's kernel supports erase keys, but is not faster than the chunked form
    # (gpu.md).
    raise ValueError(
      "implementation: 'jla' cannot take erase_key; use 'xla' or None"
    )
  per_channel = log_decay.shape[-1] > 1
  if erase_gate is not None or write_gate is not None:
    erase, write = (
      rate if gate is None else rate * gate for gate in (erase_gate, write_gate)
    )
    kind, gates = "gdn2", {"g": log_decay, "b": erase, "w": write}
    for name, like in (("g", key), ("b", key), ("w", value)):
      gates[name] = jnp.broadcast_to(gates[name], like.shape)
  elif beta is None:
    kind, gates = "gla" if per_channel else "simple_gla", {"g": log_decay}
  elif decays:
    kind = "kda" if per_channel else "gated_deltanet"
    gates = {"g": log_decay, "beta": beta}
  else:
    kind, gates = "deltanet", {"beta": beta}
  return _output(kind, query, key, value, gates, **call)


def _output(
  kind,
  *arrays,
  dtype,
  scale,
  initial_state,
  segment_ids,
  axis_name,
  num_segments=None,
  **options,
):
  """The output and the state that the kernel of a kind computes."""
  query, gates = arrays[0], arrays[3]
  qkv = [x.astype(dtype) for x in arrays[:3]]
  scale = checks.softmax_scale(scale, query.shape[-1])
  gates = {n: x[..., 0] if x.shape[-1] == 1 else x for n, x in gates.items()}
  options |= {"initial_state": initial_state, "segment_ids": segment_ids}
  obstacle = "cannot take num_segments" if num_segments else ""
  obstacle = obstacle or _obstacle(kind, qkv, gates, options, scale, axis_name)
  if obstacle:
    raise ValueError(f"implementation: 'jla' {obstacle}; use 'xla' or None")
  options |= {"scale": float(scale), "output_final_state": True}
  attend = importlib.import_module("jla.ops").linear_attention
  out, state = attend(kind, *qkv, **gates, **options, impl="mosaic_gpu")
  return out.astype(query.dtype), state


def _obstacle(kind, qkv, gates, options, scale, axis_name) -> str:
  """The reason why no kernel supports a call; empty if one does."""
  if backend.name() != "gpu":
    return f"needs an H100 or H200, got {backend.name()}"
  for package, version in _VERSIONS.items():
    try:
      installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      return f"needs the package {package} {version}, which is not installed"
    if installed != version:
      return f"needs {package} {version}, got {installed}"
  if is_sequence_sharded(axis_name):
    return "cannot take a sharded sequence"
  if isinstance(scale, jax.core.Tracer):
    return "takes a number for scale, got an array"
  module, name = _SUPPORTS[kind].split(".")
  module = importlib.import_module(f"jla.ops.mosaic_gpu.{module}")
  if getattr(module, name)(*qkv, *gates.values(), **options):
    return ""
  # The predicate gives no reason.
  query, _, value = qkv
  device = jax.devices()[0]
  generation = getattr(device, "compute_capability", "none")
  if generation != "9.0":
    return (
      "needs a device of compute capability 9.0 (H100, H200), got "
      f"{device.platform} of {generation}"
    )
  if query.dtype != jnp.bfloat16:
    return f"takes bfloat16, got {query.dtype}"
  heads, width = query.shape[2:]
  if not {width, value.shape[-1]} <= {64, 128}:
    return f"takes heads of 64 or 128, got {width} and {value.shape[-1]}"
  if kind in ("gla", "kda", "gdn2") and heads * width % 128:
    return (
      f"takes decays per channel for N·H a multiple of 128, got {heads * width}"
    )
  return f"has no {kind} kernel for queries of shape {query.shape}"
