"""Attention modules with relative position tables or projections of global tokens."""

from collections.abc import Mapping
import math
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.multi_head_attention import MultiHeadAttention

SHAW_DISTANCE = 16
"""k, to which distances are clipped, as in the paper's base model."""


class ShawAttention(MultiHeadAttention):
  """Adds to each key a trained embedding of its distance, which all heads share.

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
    options = super().options(inputs, call)
    return {**options, "relative_keys": self.relative_keys}


class DisentangledAttention(MultiHeadAttention):
  """Adds products of content and position, from embeddings P of distances.

    scale · (q_t · k_s + q_t · K_δ(t,s) + k_s · Q_δ(t,s)),   K = P·Wk, Q = P·Wq

  δ is `attention.positions.deberta_buckets`. K are the relative keys of each head, and
  Q its relative queries. By default, scale is 1/√(3H), or 1/√(2H) with only one of the
  last two terms.

  Paper: DeBERTa, equations 2 to 4, arXiv:2006.03654.
  """

  def setup(self) -> None:
    """Creates the module and the projections of positions, if they are separate."""
    super().setup()
    config = self.config.disentangled
    if not config.shared_projections:
      if "c2p" in config.terms:
        self.position_key = self.projection(math.prod(self.projections["key"]))
      if "p2c" in config.terms:
        self.position_query = self.projection(
          math.prod(self.projections["query"])
        )

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Replaces `relative_embeddings` by tables for each head."""
    return super().options(inputs, self._project_tables(call))

  @property
  def _scale(self) -> dict[str, float]:
    terms = 1 + len(self.config.disentangled.terms)
    scale = 1.0 / math.sqrt(terms * self.dims.head_dim)
    return {"scale": scale, **super()._scale}

  def _project_tables(self, call):
    """Projects the position embeddings of a call to tables `[N, 2L+1, H]`."""
    embeddings = call["relative_embeddings"]
    config, heads = self.config.disentangled, self.dims.num_heads
    rows = config.rows(self.dims.max_length - 1)
    prefix = "" if config.shared_projections else "position_"
    options = {x: y for x, y in call.items() if x != "relative_embeddings"}
    for term, name, option in (
      ("c2p", "key", "relative_keys"),
      ("p2c", "query", "relative_queries"),
    ):
      if term in config.terms:
        table = getattr(self, f"{prefix}{name}")(embeddings)
        table = table.reshape(len(table), *self.projections[name])
        table = jnp.moveaxis(table, 1, 0)[:, rows]
        options[option] = jnp.repeat(table, heads // len(table), axis=0)
    return options


class GlobalAttention(MultiHeadAttention):
  """Uses separate projections for global tokens, which attend to all tokens.

  The positions of these tokens are the `global_indices` of a call. The mechanism gets
  their projections as `global_qkv`.

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
    options = super().options(inputs, call)
    has_global = call.get("global_indices") is not None
    if not (has_global or self.is_initializing()):
      return options
    heads, kv_heads = self.dims[:2]
    qkv = tuple(
      dense(inputs).reshape(*inputs.shape[:2], number, -1)
      for dense, number in (
        (self.global_query, heads),
        (self.global_key, kv_heads),
        (self.global_value, kv_heads),
      )
    )
    return {**options, "global_qkv": qkv} if has_global else options
