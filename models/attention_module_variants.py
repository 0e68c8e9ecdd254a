"""Attention modules with tables by distance, or with projections of global tokens."""

from collections.abc import Mapping
import math
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
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


class DisentangledAttention(MultiHeadAttention):
  """Adds products of content and position, from embeddings P of distances.

    scale · (q_t · k_s + q_t · K_δ(t,s) + k_s · Q_δ(t,s)),   K = P·Wk, Q = P·Wq

  δ is `attention.positions.deberta_buckets`. K are relative keys of each head, and Q
  relative queries. By default scale is 1/√(3H), or 1/√(2H) with one of both terms.

  Paper: DeBERTa, equations 2 to 4, arXiv:2006.03654.
  """

  def setup(self) -> None:
    """Creates the module and the projections of positions, if they are separate."""
    super().setup()
    own = self.config.disentangled
    if not own.shared_projections:
      if "c2p" in own.terms:
        self.position_key = self.projection(math.prod(self.projections["key"]))
      if "p2c" in own.terms:
        self.position_query = self.projection(
          math.prod(self.projections["query"])
        )

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Replaces the embeddings `relative_embeddings` by tables of each head."""
    return super().options(inputs, self._with_tables(call))

  @property
  def _scale(self) -> dict[str, float]:
    terms = 1 + len(self.config.disentangled.terms)
    own = 1.0 / math.sqrt(terms * self.dims.head_dim)
    return {"scale": own, **super()._scale}

  def _with_tables(self, call):
    """Tables `[N, 2L+1, H]` in place of the embeddings from which they are projected."""
    embeddings = call["relative_embeddings"]
    own, heads = self.config.disentangled, self.dims.num_heads
    rows = own.rows(self.dims.max_length - 1)
    place = "" if own.shared_projections else "position_"
    tables = {x: y for x, y in call.items() if x != "relative_embeddings"}
    for term, name, option in (
      ("c2p", "key", "relative_keys"),
      ("p2c", "query", "relative_queries"),
    ):
      if term in own.terms:
        table = getattr(self, f"{place}{name}")(embeddings)
        table = table.reshape(len(table), *self.projections[name])
        table = jnp.moveaxis(table, 1, 0)[:, rows]
        tables[option] = jnp.repeat(table, heads // len(table), axis=0)
    return tables


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
