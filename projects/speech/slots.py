"""Attention modules of a Conformer, one for each position encoding."""

from collections.abc import Mapping
import math
import types
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from attention import rotary
from models.embeddings import sinusoidal
from models.multi_head_attention import MultiHeadAttention


class TransformerXlAttention(MultiHeadAttention):
  """Adds projected sines of the distance to the logits, with two biases.

    scale · ((q_t + u) · k_s + (q_t + v) · r_{t−s}),   r_i = W_n · sines(i)

  With q_t + u as the query, r are the relative keys of each head, and the remaining term
  scale · (v − u) · r is a relative bias.

  Paper: Transformer-XL, section 3.3, arXiv:1901.02860.
  """

  def setup(self) -> None:
    """Creates the attention module, the projection of sines and both biases."""
    super().setup()
    heads = self.dims.num_heads, self.dims.head_dim
    self.position = nn.Dense(
      math.prod(heads),
      use_bias=False,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    normal = nn.initializers.normal(0.02)
    self.key_bias, self.position_bias = (
      self.param(name, normal, heads, self.param_dtype)
      for name in ("key_bias", "position_bias")
    )

  def prepare(
    self,
    query: Any,
    key: Any,
    positions: Any,
  ) -> tuple[Any, Any]:
    """Adds u to the queries."""
    query, key = super().prepare(query, key, positions)
    return query + self.key_bias.astype(query.dtype)[None, None], key

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Adds relative tables for T positions, and the scale, to the call."""
    _, length, features = inputs.shape
    # A table starts with the largest distance to the left.
    distances = np.arange(length - 1, -length, -1)[None, :]
    sines = sinusoidal(distances, features)[0]
    dtype = self.dtype or sines.dtype
    keys = self.position(sines.astype(dtype))
    keys = keys.reshape(len(sines), *self.key_bias.shape)
    scale = self.config.attention_scale or self.dims.head_dim**-0.5
    difference = (self.position_bias - self.key_bias).astype(keys.dtype)
    return {
      **call,
      "relative_keys": jnp.moveaxis(keys, 1, 0),
      "relative_bias": scale * jnp.einsum("ENH,NH->NE", keys, difference),
      "scale": scale,
    }


class RotaryInputsAttention(MultiHeadAttention):
  """Rotates the inputs of the query and key projections, head by head.

  Values are projected from the unrotated inputs, as in Wav2Vec2Conformer.
  """

  def setup(self) -> None:
    """Creates the attention module.

    Raises:
      ValueError: the mechanism computes its own keys.
    """
    if "own_keys" in self.attention.supports:
      raise ValueError(
        "position: rotary_inputs rotates the inputs of the key projection, but "
        "this mechanism computes its own keys; expected rotary"
      )
    super().setup()

  def sources(
    self,
    sources: dict[str, Float[Array, "B T F"]],
    positions: Any,
    deterministic: bool,
    call: dict[str, Any],
  ) -> dict[str, Float[Array, "B T F"]]:
    """Returns rotated inputs for queries and keys."""
    del deterministic, call
    inputs = sources["query"]
    heads = inputs.reshape(*inputs.shape[:2], self.dims.num_heads, -1)
    rotated = rotary(heads, positions, theta=self.config.rotary_theta)
    rotated = rotated.reshape(inputs.shape)
    return {**sources, "query": rotated, "key": rotated}


ATTENTION_MODULES = types.MappingProxyType(
  {
    "transformer_xl": TransformerXlAttention,
    "rotary": MultiHeadAttention,
    "rotary_inputs": RotaryInputsAttention,
    "none": MultiHeadAttention,
  }
)
"""Maps `position` of a Conformer to the attention module of its blocks."""
