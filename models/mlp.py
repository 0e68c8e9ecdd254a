"""The feed-forward layer of a Transformer."""

import functools

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.head_projections import kernel_init


class Mlp(nn.Module):
  """FFN(x) = activation(x·W1 + b1)·W2 + b2.

  With `gated`, it is (activation(x·Wg + bg) ⊙ (x·W1 + b1))·W2 + b2.

  Attributes:
    config: the config of the model.
    out_scale: factor of the second kernel's initial values.
    features: the hidden width; None is `mlp_features` of the config.

  Papers: Attention is all you need, section 3.3, arXiv:1706.03762; GLU variants
  improve Transformer, arXiv:2002.05202.
  """

  config: ModelConfig
  out_scale: float
  features: int | None = None

  @nn.compact
  def __call__(self, inputs: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """Applies the network to each position."""
    config = self.config
    features = self.features or config.mlp_features
    dense = functools.partial(
      nn.Dense,
      use_bias=config.mlp.mlp_bias,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )
    first = dense(features, name="hidden")
    last = dense(
      config.features,
      kernel_init=kernel_init(self.out_scale),
      name="out",
    )
    if not config.gated:
      return last(config.activation_function(first(inputs)))
    gate = dense(features, name="gate")
    return last(gated_product(config, gate(inputs), first(inputs)))


def gated_product(
  config: ModelConfig, gate: Float[Array, "*A I"], hidden: Float[Array, "*A I"]
) -> Float[Array, "*A I"]:
  """Returns activation(α·g) / α ⊙ (h + o) of a gate g and hidden features h.

  Before that, g is multiplied by its factor and clipped to at most the limit c, and h
  is clipped to [−c, c].
  """
  mlp, activation = config.mlp, config.activation_function
  if mlp.gate_factor != 1.0:
    gate = mlp.gate_factor * gate
  if mlp.gate_limit is not None:
    gate = jnp.minimum(gate, mlp.gate_limit)
    hidden = jnp.clip(hidden, -mlp.gate_limit, mlp.gate_limit)
  if mlp.gate_offset:
    hidden = hidden + mlp.gate_offset
  if mlp.gate_slope != 1.0:
    return activation(mlp.gate_slope * gate) / mlp.gate_slope * hidden
  return activation(gate) * hidden
