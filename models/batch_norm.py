"""Batch norm over the frames that are not padding."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MOMENTUM = 0.9
"""Decay of the running statistics per step, as in PyTorch."""

EPSILON = 1e-5
"""ε, the number added to the variance, as in PyTorch."""


class BatchNorm(nn.Module):
  """(x − mean) / √(variance + ε) · γ + β, over the rows and frames of a batch.

  In training, mean and variance are those of the batch without padding, and the
  running statistics, in 'batch_stats', move a tenth of the way towards them. In
  evaluation, the running statistics are used.

  Under `pmap`, sums and counts are added over devices and divided once. Flax's module
  averages the means of the devices instead, which differs if the devices have
  different numbers of frames.

  Attributes:
    dtype: the dtype of the result.
    param_dtype: the dtype of γ and β.

  Paper: Batch normalization, arXiv:1502.03167.
  """

  dtype: Any = None
  param_dtype: Any = "float32"

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T F"],
    mask: Bool[Array, "B T"] | None = None,
    *,
    deterministic: bool = True,
    axis_name: str | None = None,
  ) -> Float[Array, "B T F"]:
    """Normalizes every feature.

    Args:
      x: `[B, T, F]`.
      mask: `[B, T]`, the frames that are not padding; None is all of them.
      deterministic: whether to use the running statistics.
      axis_name: axis of a `pmap` whose devices share the rows of one batch.
    """
    size = x.shape[-1]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    shape = (size,)
    running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, dtype)
    running_var = self.variable("batch_stats", "var", jnp.ones, shape, dtype)
    scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
    bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
    x = x.astype(dtype)
    mean, variance = running_mean.value, running_var.value
    if not deterministic:
      count, mean, variance = _statistics(x, mask, axis_name)
      if self.is_mutable_collection("batch_stats"):
        for running, new in ((running_mean, mean), (running_var, variance)):
          updated = MOMENTUM * running.value + (1 - MOMENTUM) * new
          running.value = jnp.where(count > 0, updated, running.value)
    factor = scale.astype(dtype) * jax.lax.rsqrt(
      variance.astype(dtype) + EPSILON
    )
    out = (x - mean[None, None]) * factor[None, None]
    out = out + bias.astype(dtype)[None, None]
    return out.astype(self.dtype or dtype)


def _statistics(
  x: Float[Array, "B T F"],
  mask: Bool[Array, "B T"] | None,
  axis_name: str | None,
) -> tuple[Float[Array, ""], Float[Array, "F"], Float[Array, "F"]]:
  """Returns the number of frames and their mean and variance, which are 0 if none."""

  def sum_devices(total):
    return total if axis_name is None else jax.lax.psum(total, axis_name)

  weights = jnp.ones(x.shape[:2], x.dtype)
  if mask is not None:
    weights = mask.astype(x.dtype)
  count = sum_devices(jnp.sum(weights))
  divisor = jnp.maximum(count, 1)

  def mean_of(values):
    return sum_devices(jnp.einsum("BTF,BT->F", values, weights)) / divisor

  # Padding may contain any values, even NaN.
  x = jnp.where(weights[..., None] > 0, x, 0)
  mean = mean_of(x)
  return count, mean, mean_of(jnp.square(x - mean[None, None]))
