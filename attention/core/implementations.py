"""Which kernel computes `flash_attention`: XLA's blocks, cuDNN or tokamax."""

from collections.abc import Mapping
import importlib
import importlib.util
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Implementation = Literal["xla", "cudnn", "tokamax"]


def check_name(implementation: str | None) -> None:
  """Checks the name of an implementation.

  Raises:
    ValueError: there is none of that name.
  """
  known = get_args(Implementation)
  if implementation is not None and implementation not in known:
    raise ValueError(
      f"implementation: expected None or one of {', '.join(known)}, got "
      f"{implementation!r}"
    )


def choose(
  implementation: Implementation | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  without: Mapping[str, bool],
) -> Implementation:
  """The implementation of a call.

  Args:
    implementation: what the caller asked for; None is cuDNN on a GPU where it
      can serve the call and 'xla' elsewhere.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    without: options that only 'xla' has -> whether the call has them.

  Raises:
    ValueError: what was asked for cannot serve the call.
  """
  check_name(implementation)
  if implementation == "xla":
    return implementation
  obstacle = _obstacle(implementation or "cudnn", query, value, without)
  if implementation is None:
    return "xla" if obstacle else "cudnn"
  if obstacle:
    raise ValueError(
      f"implementation: {implementation!r} {obstacle}; use 'xla' or None"
    )
  return implementation


def _obstacle(
  implementation: Implementation,
  query: Float[Array, "B T N H"],
  value: Float[Array, "B S K V"],
  without: Mapping[str, bool],
) -> str:
  """Why the implementation cannot serve the call; empty where it can."""
  if jax.default_backend() != "gpu":
    return f"needs a GPU, got {jax.default_backend()}"
  if implementation == "tokamax" and not importlib.util.find_spec("tokamax"):
    return "needs the package tokamax, which is not installed"
  for option, given in without.items():
    if given:
      return f"cannot take {option}"
  if query.dtype not in (jnp.float16, jnp.bfloat16):
    return f"takes float16 and bfloat16, got {query.dtype}"
  if implementation == "cudnn" and value.shape[-1] != query.shape[-1]:
    return (
      f"needs values as wide as queries, got {value.shape[-1]} and "
      f"{query.shape[-1]}"
    )
  return ""


def call(
  implementation: Implementation,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  mask: Bool[Array, "..."] | None,
  bias: Float[Array, "..."] | None,
  is_causal: bool,
  scale: float | Float[Array, ""],
) -> Float[Array, "B T N V"]:
  """Calls a GPU kernel; a query that sees nothing gets zeros here too.

  The kernels give such a query the mean of all values, so it is found from the
  mask and put right after the call.
  """
  if isinstance(scale, jax.Array):
    query, scale = query * scale.astype(query.dtype), 1.0
  arrays = {"mask": mask, "bias": bias, "is_causal": is_causal}
  if implementation == "cudnn":
    out = jax.nn.dot_product_attention(
      query, key, value, scale=scale, implementation="cudnn", **arrays
    )
  else:
    tokamax = importlib.import_module("tokamax")  # An extra of 250 MB.
    out = tokamax.dot_product_attention(
      query, key, value, scale=scale, **arrays
    )
  if mask is None:
    return out
  if is_causal:
    mask = mask & jnp.tri(query.shape[1], key.shape[1], dtype=bool)[None, None]
  sees = jnp.any(mask, axis=-1)  # [B, N, T], any of them 1
  return jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], out, 0)
