"""The norms of `norm_kind`."""

from collections.abc import Callable, Mapping
import functools
import types
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

layer_without_bias = functools.partial(nn.LayerNorm, use_bias=False)


class RmsNormFromOne(nn.Module):
  """x / √(mean of x² + ε) · (1 + γ), computed in float32 or more.

  Attributes:
    epsilon: ε.
    dtype: the dtype of the result.
    param_dtype: the dtype of γ, which is initialized to 0.
  """

  epsilon: float
  dtype: Any
  param_dtype: Any

  @nn.compact
  def __call__(self, x: Float[Array, "*A F"]) -> Float[Array, "*A F"]:
    """Normalizes along the last axis."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    scale = self.param(
      "scale", nn.initializers.zeros, x.shape[-1:], self.param_dtype
    )
    scale = 1.0 + scale.astype(dtype).reshape(*[1] * (x.ndim - 1), -1)
    norm = nn.RMSNorm(epsilon=self.epsilon, dtype=dtype, use_scale=False)
    return (norm(x) * scale).astype(self.dtype)


NORM_KINDS: Mapping[str, Callable[..., nn.Module]] = types.MappingProxyType(
  {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "rms_from_one": RmsNormFromOne,
    "layer_without_bias": layer_without_bias,
  }
)
"""Maps `norm_kind` to its module, which takes `epsilon`, `dtype` and `param_dtype`.

  'layer'         (x − mean) / √(variance + ε) · γ + β
  'rms'           x / √(mean of x² + ε) · γ
  'rms_from_one'  x / √(mean of x² + ε) · (1 + γ)

and 'layer_without_bias', which has no β. Mean and variance are float32, or float64 if
the input is.

Papers: Layer normalization, arXiv:1607.06450; Root mean square layer normalization,
arXiv:1910.07467; Gemma, arXiv:2403.08295.
"""
