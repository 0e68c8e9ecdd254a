"""The norms that a config chooses between."""

from flax import linen as nn

from models.config import ModelConfig


def make_norm(config: ModelConfig, name: str | None = None) -> nn.Module:
  """A norm of the last axis, as `norm_kind` and `norm_epsilon` say.

    'layer'   (x − mean) / √(variance + ε) · γ + β
    'rms'     x / √(mean of x² + ε) · γ

  Mean and variance are float32, or float64 like the input.

  Papers: Layer normalization, arXiv:1607.06450; Root mean square layer
  normalization, arXiv:1910.07467.
  """
  norm = nn.LayerNorm if config.norm_kind == "layer" else nn.RMSNorm
  return norm(
    epsilon=config.norm_epsilon,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    name=name,
  )
