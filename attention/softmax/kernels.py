"""Kernels for exact attention: cuDNN and tokamax, where they support a call.

Their limits come from the sources of jax 0.10 (`jax/_src/cudnn`), cudnn-frontend 1.9 to
1.14 and tokamax 0.0.12, and were tested on an H100 with jax 0.11.2 and tokamax 0.0.17
(benchmarks/gpu.md).
"""

import importlib
import importlib.util
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.platform import backend
from attention.softmax.logits import Logits
from attention.softmax.visible import Visible

Implementation = Literal["xla", "cudnn", "tokamax"]

InParts = Literal["ring", "balanced", "all_to_all"]
"""How several devices, each with a shard of the sequence, compute attention."""

_PLATFORMS = {"cudnn": ("gpu",), "tokamax": ("gpu", "tpu")}


def kernel_output(
  implementation: Implementation | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible,
  logits: Logits,
  **others: Any,
) -> Float[Array, "B T N V"] | None:
  """The output of cuDNN or tokamax; None if XLA's blocks compute the call.

  It equals the output of XLA's blocks: a query that sees no key gets zeros, for which
  the kernels return the mean of all values, and masked keys have no effect, even if
  NaN.

  Args:
    implementation: the caller's choice; None means cuDNN on a GPU if it supports the
      call, and 'xla' otherwise.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    visible: the visible pairs. A kernel takes one mask, and either causality or a
      window.
    logits: the options for logits. A kernel takes a scale and a bias.
    **others: options that only 'xla' supports; None if the call does not have them.

  Raises:
    ValueError: the implementation that the caller chose does not support the call.

  Memory: that of the kernel. cuDNN reads a mask and a bias as one bias over all
  of T×S, and on a TPU tokamax reads a window as a mask over T×S.
  """
  if implementation == "xla":
    return None
  kernel = implementation or "cudnn"
  obstacle = _obstacle(kernel, query, key, value, visible, logits, others)
  if obstacle and implementation:
    elsewhere = "use 'xla' or None"
    if implementation == "tokamax" and backend.name() == "cpu":
      elsewhere += ", or a TPU"
    raise ValueError(
      f"implementation: {implementation!r} {obstacle}; {elsewhere}"
    )
  if obstacle:
    return None
  return _call(kernel, query, key, value, visible, logits)


def _obstacle(kernel, query, key, value, visible, logits, others) -> str:
  """The reason why a kernel does not support a call; empty if it does."""
  # The program must target such a device and also be traced on one, because both
  # libraries query the local device for its capabilities.
  for name in (backend.name(), jax.default_backend()):
    if name not in _PLATFORMS[kernel]:
      return f"needs a GPU, got {name}"
  if kernel == "tokamax" and not importlib.util.find_spec("tokamax"):
    return "needs the package tokamax, which is not installed"
  others = {
    "query_segment_ids": visible.segments or None,
    "mask_mod": visible.mods or None,
    "visible": visible.bands or visible.masks[1:] or visible.positions,
    "relative_bias": logits.relative_bias,
    "relative_keys": logits.relative_keys,
    "relative_queries": logits.relative_queries,
    "sinks": logits.sinks,
    "logits_soft_cap": logits.soft_cap,
    "log_forget": logits.log_forget,
    "score_mod": logits.score_mod,
    **others,
  }
  for name, option in others.items():
    if option is not None:
      return f"cannot take {name}"
  if _has_window(visible) and query.shape[1] != key.shape[1]:
    # tokamax centres the window of query t on key t. cuDNN refuses T > S, and does not
    # document where it places the window if T < S.
    return (
      "takes a window over one sequence only, got lengths "
      f"{query.shape[1]} and {key.shape[1]}"
    )
  if backend.name() == "tpu":
    return _mosaic_obstacle(query, _mask(visible), logits.bias)
  if query.dtype not in (jnp.float16, jnp.bfloat16):
    return f"takes float16 and bfloat16, got {query.dtype}"
  if kernel == "cudnn":
    return _cudnn_obstacle(query, key, value, visible)
  return ""


def _mask(visible: Visible) -> Bool[Array, "#B #N #T #S"] | None:
  """The only mask of a call that a kernel supports, or None."""
  return visible.masks[0] if visible.masks else None


def _has_window(visible: Visible) -> bool:
  """Whether a call has a window, apart from causality."""
  return visible.left is not None or visible.right not in (None, 0)


def _cudnn_obstacle(query, key, value, visible) -> str:
  """The reason why cuDNN, or JAX's check for it, refuses a call."""
  head_dim = query.shape[-1]
  if value.shape[-1] != head_dim:
    return (
      f"needs values as wide as queries, got {value.shape[-1]} and {head_dim}"
    )
  device = jax.devices()[0]
  if "rocm" in device.client.platform_version:
    return "needs an NVIDIA GPU, got ROCm"
  generation = getattr(device, "compute_capability", "9.0")
  if float(generation) < 8:
    return f"needs compute capability 8.0 or more, got {generation}"
  widest = 256 if float(generation) >= 9 else 128
  if head_dim % 8 or head_dim > widest:
    return (
      f"takes heads of a multiple of 8 features, at most {widest}, got "
      f"{head_dim}"
    )
  if _has_window(visible) and visible.right != 0:
    sides = visible.left, visible.right
    return f"takes windows to the left only, got (left, right) = {sides}"
  if _has_window(visible) and visible.masks:
    return "cannot take mask with a window"  # It would be a bias.
  return ""


def _mosaic_obstacle(query, mask, bias) -> str:
  """The reason why tokamax's TPU kernel refuses a call.

  tokamax would then fall back to its T×S form, which is no better than 'xla'.
  """
  if query.dtype not in (jnp.float32, jnp.bfloat16):
    return f"takes float32 and bfloat16 on a TPU, got {query.dtype}"
  if bias is not None:
    return "cannot take bias on a TPU"
  if mask is not None and mask.shape[:2] != (1, 1):
    return (
      "takes one mask for all examples and heads on a TPU, got shape "
      f"{mask.shape}"
    )
  return ""


def _call(kernel, query, key, value, visible, logits):
  """Calls cuDNN or tokamax with arguments that it supports."""
  mask, bias = _mask(visible), logits.bias
  scale = checks.softmax_scale(logits.scale, query.shape[-1])
  if isinstance(scale, jax.Array):
    query, scale = query * scale.astype(query.dtype), 1.0
  length, source = query.shape[1], key.shape[1]
  is_causal = visible.right == 0
  options: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
  if _has_window(visible):
    sides = visible.left, visible.right
    options["local_window_size"] = tuple(
      source if side is None else min(side, source) for side in sides
    )
  # A kernel masks keys by their logits, which does not remove a NaN.
  arrays = (
    query,
    visible.readable(key),
    visible.readable(value),
    mask,
    bias,
  )
  is_padding_masked = is_causal and length <= source
  if kernel == "cudnn":
    if source % 2 and not is_padding_masked and mask is None and bias is None:
      # Lengths are cheaper than a mask, which would become a bias.
      options["key_value_seq_lengths"] = jnp.full(
        key.shape[0], source, jnp.int32
      )
      is_padding_masked = True
    # cuDNN's backward pass takes only even lengths.
    arrays = _pad(*arrays, is_padding_masked, multiple=2)
    options["implementation"] = "cudnn"
    attend = jax.nn.dot_product_attention
  else:
    on_tpu = backend.name() == "tpu"
    if on_tpu and options.pop("local_window_size", None):
      window_mask = visible.block(0, length, 0, source)
      arrays = (*arrays[:3], window_mask, bias)
    # On a GPU, tiles with a bias or a mask of all pairs must be full.
    if on_tpu or bias is not None or (mask is not None and mask.shape[2] > 1):
      arrays = _pad(*arrays, is_padding_masked, multiple=128)
    tokamax = importlib.import_module("tokamax")  # An extra of 250 MB.
    attend = tokamax.dot_product_attention
  *qkv, padded_mask, padded_bias = arrays
  out = attend(*qkv, mask=padded_mask, bias=padded_bias, **options)[:, :length]
  if mask is None:
    return out
  return jnp.where(_has_visible_key(mask, visible, length, source), out, 0)


def _pad(query, key, value, mask, bias, is_padding_masked, multiple):
  """Pads all arrays to lengths that are multiples of `multiple`.

  A mask excludes the padding, unless the call already does (`is_padding_masked`). The
  mask and the bias are returned in full size, T×S.
  """
  length, source = query.shape[1], key.shape[1]
  rows, columns = -length % multiple, -source % multiple
  if mask is None and columns and not is_padding_masked:
    mask = jnp.ones((1, 1, 1, source), bool)

  def pad_sequence(x, count):
    return jnp.pad(x, ((0, 0), (0, count), (0, 0), (0, 0)))

  def pad_pairs(x):
    if x is None:
      return None
    x = jnp.broadcast_to(x, (*x.shape[:2], length, source))
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, columns)))

  keys = pad_sequence(key, columns), pad_sequence(value, columns)
  return pad_sequence(query, rows), *keys, pad_pairs(mask), pad_pairs(bias)


def _has_visible_key(
  mask: Bool[Array, "#B #N #T #S"], visible: Visible, length: int, source: int
) -> Bool[Array, "#B #T #N 1"]:
  """Whether each query sees any key; takes time T + S for a key mask."""
  if mask.shape[2] > 1:
    pairs = cast(Array, visible.block(0, length, 0, source))
    return jnp.swapaxes(jnp.any(pairs, axis=-1), 1, 2)[..., None]
  mask = jnp.broadcast_to(mask[:, :, 0], (*mask.shape[:2], source))
  # before[s] is the number of visible keys before s.
  before = jnp.pad(jnp.cumsum(mask, axis=-1), ((0, 0), (0, 0), (1, 0)))
  first = end = jnp.arange(length)
  first = first * 0 if visible.left is None else first - visible.left
  end = end * 0 + source if visible.right is None else end + visible.right + 1
  first, end = (jnp.clip(x, 0, source) for x in (first, end))
  sees_any = before[:, :, end] > before[:, :, first]
  return jnp.swapaxes(sees_any, 1, 2)[..., None]
