"""Which kernel computes exact attention: the blocks here (XLA), cuDNN, tokamax.

The limits were read in jax 0.10 (`jax/_src/cudnn`), cudnn-frontend 1.9 to 1.14
and tokamax 0.0.12, and tried on an H100 with jax 0.11.2 and tokamax 0.0.17
(benchmarks/gpu.md).
"""

from collections.abc import Mapping
import importlib
import importlib.util
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, platform
from attention.visible import Visible, causal, window

Implementation = Literal["xla", "cudnn", "tokamax"]

InParts = Literal["ring", "balanced", "all_to_all"]
"""How several devices attend to a sequence of which each has a part."""

_PLATFORMS = {"cudnn": ("gpu",), "tokamax": ("gpu", "tpu")}


def kernel_output(
  implementation: Implementation | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  mask: Bool[Array, "..."] | None,
  bias: Float[Array, "..."] | None = None,
  *,
  sides: tuple[int, int] | None = None,
  is_causal: bool,
  scale: float | Float[Array, ""] | None,
  others: Mapping[str, Any],
) -> Float[Array, "B T N V"] | None:
  """What cuDNN or tokamax gives for a call; None where the blocks here serve it.

  It is what the blocks would give: zeros where a query sees nothing, which the
  kernels give the mean of all values, and nothing of what a masked key holds.

  Args:
    implementation: what the caller asked for; None is cuDNN on a GPU where it
      can serve the call and 'xla' elsewhere.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    mask: broadcastable to `[B, N, T, S]`, True = attend.
    bias: broadcastable to `[B, N, T, S]`.
    sides: (left, right) of a window, as `local_window_size` in jax.nn, with
      right = 0 if the call is causal; None is a call without a window.
    is_causal: whether queries see no later keys.
    scale: factor of the logits; None is 1/√H.
    others: options of the call that only 'xla' has.

  Raises:
    ValueError: what was asked for cannot serve the call.

  Memory: that of the kernel. cuDNN reads a mask and a bias as one bias over all
  of T×S, and on a TPU tokamax reads a window as a mask over T×S.
  """
  if implementation == "xla":
    return None
  arrays = query, key, value, mask, bias
  kernel = implementation or "cudnn"
  obstacle = _obstacle(kernel, *arrays, sides, others)
  if obstacle and implementation:
    on_tpu = implementation == "tokamax" and platform.name() == "cpu"
    raise ValueError(
      f"implementation: {implementation!r} {obstacle}; use 'xla' or None"
      + ", or a TPU" * on_tpu
    )
  if obstacle:
    return None
  scale = arguments.softmax_scale(scale, query.shape[-1])
  return _call(kernel, *arrays, sides, is_causal, scale)


def _obstacle(kernel, query, key, value, mask, bias, sides, others) -> str:
  """Why a kernel cannot serve a call; empty where it can."""
  # The program must be meant for such a device and be traced where there is
  # one: both libraries ask the device at hand what it can do.
  for name in (platform.name(), jax.default_backend()):
    if name not in _PLATFORMS[kernel]:
      return f"needs a GPU, got {name}"
  if kernel == "tokamax" and not importlib.util.find_spec("tokamax"):
    return "needs the package tokamax, which is not installed"
  for option, given in others.items():
    if given is not None and given is not False and not _is_zero(given):
      return f"cannot take {option}"
  if sides is not None and query.shape[1] != key.shape[1]:
    # tokamax counts the window of query t from key t of an array of S; cuDNN
    # refuses T > S, and where it puts the window of T < S is not documented.
    return (
      "takes a window over one sequence only, got lengths "
      f"{query.shape[1]} and {key.shape[1]}"
    )
  if platform.name() == "tpu":
    return _mosaic_obstacle(query, key, value, mask, bias)
  if query.dtype not in (jnp.float16, jnp.bfloat16):
    return f"takes float16 and bfloat16, got {query.dtype}"
  if kernel == "cudnn":
    return _cudnn_obstacle(query, key, value, mask, sides)
  return ""


def _is_zero(given: Any) -> bool:
  return isinstance(given, int | float) and given == 0


def _cudnn_obstacle(query, key, value, mask, sides) -> str:
  """What cuDNN and the check of it in JAX refuse."""
  if not query.dtype == key.dtype == value.dtype:
    return f"takes one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
  head_dim = query.shape[-1]
  if value.shape[-1] != head_dim:
    return (
      f"needs values as wide as queries, got {value.shape[-1]} and {head_dim}"
    )
  device = jax.devices()[0]
  if "rocm" in device.client.platform_version:
    return "needs a GPU of NVIDIA's, got ROCm"
  generation = getattr(device, "compute_capability", "9.0")
  if float(generation) < 8:
    return f"needs compute capability 8.0 or more, got {generation}"
  widest = 256 if float(generation) >= 9 else 128
  if head_dim % 8 or head_dim > widest:
    return (
      f"takes heads of a multiple of 8 features, at most {widest}, got "
      f"{head_dim}"
    )
  if sides is not None and sides[1]:
    return f"takes windows to the left only, got (left, right) = {sides}"
  if sides is not None and mask is not None:
    return "cannot take mask with a window"  # It would be a bias.
  return ""


def _mosaic_obstacle(query, key, value, mask, bias) -> str:
  """What tokamax's kernel for TPU refuses.

  tokamax would then use its T×S form, which does not justify leaving 'xla'.
  """
  for x in (query, key, value):
    if x.dtype not in (jnp.float32, jnp.bfloat16):
      return f"takes float32 and bfloat16 on a TPU, got {x.dtype}"
  if bias is not None:
    return "cannot take bias on a TPU"
  if mask is not None and mask.shape[:2] != (1, 1):
    return (
      "takes one mask for all examples and heads on a TPU, got shape "
      f"{mask.shape}"
    )
  return ""


def _call(kernel, query, key, value, mask, bias, sides, is_causal, scale):
  """Calls cuDNN or tokamax for a call that it can serve."""
  if isinstance(scale, jax.Array):
    query, scale = query * scale.astype(query.dtype), 1.0
  length, source = query.shape[1], key.shape[1]
  visible = Visible() if mask is None else Visible(masks=(mask,))
  options: dict[str, Any] = {"scale": scale}
  if sides is not None:
    left, right = (min(side, source) for side in sides)
    is_causal |= right == 0
    visible &= window(left, right)
    options["local_window_size"] = (left, right)
  if is_causal:
    visible &= causal()
  options["is_causal"] = is_causal
  # A kernel hides a key by its logit, which NaN would survive.
  arrays = (query, visible.readable(key), visible.readable(value), mask, bias)

  hidden = is_causal and length <= source

  if kernel == "cudnn":
    if source % 2 and not hidden and mask is None and bias is None:
      # Cheaper than a mask, which would become a bias.
      options["key_value_seq_lengths"] = jnp.full(len(key), source, jnp.int32)
      hidden = True
    # Its backward takes even lengths only.
    arrays = _padded(*arrays, hidden, multiple=2)
    options["implementation"] = "cudnn"
    attend = jax.nn.dot_product_attention
  else:
    on_tpu = platform.name() == "tpu"
    if on_tpu and options.pop("local_window_size", None):
      whole = visible.block(0, length, 0, source)
      arrays = (*arrays[:3], whole, bias)
    # On a GPU, its tiles of pairs must be whole.
    if on_tpu or bias is not None or (mask is not None and mask.shape[2] > 1):
      arrays = _padded(*arrays, hidden, multiple=128)
    tokamax = importlib.import_module("tokamax")  # An extra of 250 MB.
    attend = tokamax.dot_product_attention
  *qkv, padded_mask, padded_bias = arrays
  out = attend(*qkv, mask=padded_mask, bias=padded_bias, **options)[:, :length]
  if mask is None:
    return out
  return jnp.where(_rows_that_see(mask, visible, length, source), out, 0)


def _padded(query, key, value, mask, bias, hidden, multiple):
  """All of them with lengths that are multiples.

  A mask hides the keys that it adds, unless they are `hidden` without one. Mask and
  bias come back with all of T×S.
  """
  length, source = query.shape[1], key.shape[1]
  rows, columns = -length % multiple, -source % multiple
  if mask is None and columns and not hidden:
    mask = jnp.ones((1, 1, 1, source), bool)

  def sequence(x, more):
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))

  def pairs(x):
    if x is None:
      return None
    x = jnp.broadcast_to(x, (*x.shape[:2], length, source))
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, columns)))

  keys = sequence(key, columns), sequence(value, columns)
  return sequence(query, rows), *keys, pairs(mask), pairs(bias)


def _rows_that_see(
  mask: Bool[Array, "#B #N #T #S"], visible: Visible, length: int, source: int
) -> Bool[Array, "#B #T #N 1"]:
  """Which queries see any key; for a key mask in time T + S."""
  if mask.shape[2] > 1:
    whole = cast(Array, visible.block(0, length, 0, source))
    return jnp.swapaxes(jnp.any(whole, axis=-1), 1, 2)[..., None]
  mask = jnp.broadcast_to(mask[:, :, 0], (*mask.shape[:2], source))
  # before[s] is how many keys before s are visible.
  before = jnp.pad(jnp.cumsum(mask, axis=-1), ((0, 0), (0, 0), (1, 0)))
  first = end = jnp.arange(length)
  first = first * 0 if visible.left is None else first - visible.left
  end = end * 0 + source if visible.right is None else end + visible.right + 1
  first, end = (jnp.clip(x, 0, source) for x in (first, end))
  sees = before[:, :, end] > before[:, :, first]
  return jnp.swapaxes(sees, 1, 2)[..., None]
