"""Attention modules with relative keys, or with projections of global tokens."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from models.multi_head_attention import MultiHeadAttention

SHAW_DISTANCE = 16
"""k, beyond which all distances share a relative key, as in the paper's base model."""


class ShawAttention(MultiHeadAttention):
  """Adds a trained embedding of its distance to every key, shared by the heads.

  Paper: Self-attention with relative position representations, arXiv:1803.02155.
  """

  def setup(self) -> None:
    """Creates the module and its table of relative keys, `[2k + 1, H]`."""
    super().setup()
    self.relative_keys = self.param(
      "relative_keys",
      nn.initializers.normal(0.02),
      (2 * SHAW_DISTANCE + 1, self.dims.head_dim),
      self.param_dtype,
    )

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Adds the table to the options of the call."""
    own = super().options(inputs, call)
    return {**own, "relative_keys": self.relative_keys}


class GlobalAttention(MultiHeadAttention):
  """Gives separate projections to global tokens, which attend to all tokens.

  The tokens are the `global_indices` of a call, and their projections the mechanism's
  `global_qkv`.

  Paper: Longformer, section 3.1, arXiv:2004.05150.
  """

  def setup(self) -> None:
    """Creates the module and the projections of global tokens."""
    super().setup()
    heads, kv_heads, head_dim = self.dims[:3]
    self.global_query = self.projection(heads * head_dim)
    self.global_key = self.projection(kv_heads * head_dim)
    self.global_value = self.projection(kv_heads * self.mechanism_dims.values)

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Adds the global projections of all tokens to the options of the call."""
    own = super().options(inputs, call)
    is_asked = call.get("global_indices") is not None
    if not (is_asked or self.is_initializing()):
      return own
    heads, kv_heads = self.dims[:2]
    qkv = tuple(
      dense(inputs).reshape(*inputs.shape[:2], number, -1)
      for dense, number in (
        (self.global_query, heads),
        (self.global_key, kv_heads),
        (self.global_value, kv_heads),
      )
    )
    return {**own, "global_qkv": qkv} if is_asked else own
