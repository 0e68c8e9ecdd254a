"""One layer of a Transformer, for encoders and decoders alike."""

from collections.abc import Callable
import functools
import math

from flax import linen as nn
import jax
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import Dims
from models.config import AttentionConfig, ModelConfig
from models.multi_head_attention import MultiHeadAttention, kernel_init
from models.rows import by_rows

SHAW_DISTANCE = 16
"""k: keys farther away share a relative key, as in the paper's base model."""


class Mlp(nn.Module):
  """FFN(x) = activation(x·W1 + b1)·W2 + b2.

  Attributes:
    config: of the model.
    out_scale: factor of the second kernel's initial values.

  Paper: Attention is all you need, section 3.3, arXiv:1706.03762.
  """

  config: ModelConfig
  out_scale: float

  @nn.compact
  def __call__(self, inputs: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """Applies it to each position."""
    config = self.config
    dense = functools.partial(
      nn.Dense, dtype=config.dtype, param_dtype=config.param_dtype
    )
    first = dense(config.mlp_features, name="hidden")
    last = dense(
      config.features, kernel_init=kernel_init(self.out_scale), name="out"
    )
    activation = getattr(jax.nn, config.activation)
    return by_rows(lambda rows: last(activation(first(rows))), inputs)


class Block(nn.Module):
  """One layer: self-attention, cross-attention where asked, feed-forward.

  Each is a residual sub-layer: norm(x + dropout(f(x))) with norm 'post',
  x + dropout(f(norm(x))) with norm 'pre'. The last kernel of each starts
  1/√(number of sub-layers) smaller, so that the residual stream has about the
  same size at any depth (GPT-2, section 2.3).

  Attributes:
    config: of the model.
    self_mechanism: attends within the sequence.
    max_length: of the sequence.
    cross_mechanism: attends to an encoder's output; None has no such sub-layer.
    max_memory_length: of the encoder's output.
  """

  config: ModelConfig
  self_mechanism: AttentionConfig
  max_length: int
  cross_mechanism: AttentionConfig | None = None
  max_memory_length: int = 0

  def setup(self) -> None:
    """Makes the sub-layers and their norms."""
    config = self.config
    sublayers = 2 if self.cross_mechanism is None else 3
    out_scale = 1.0 / math.sqrt(sublayers * config.num_layers)
    norm = functools.partial(
      nn.LayerNorm, dtype=config.dtype, param_dtype=config.param_dtype
    )

    def slot(mechanism, max_length, position):
      return MultiHeadAttention(
        attention=mechanism.build(),
        dims=Dims(
          config.num_heads, config.kv_heads, config.head_dim, max_length
        ),
        features=config.features,
        rotary=position == "rotary",
        relative_distance=SHAW_DISTANCE if position == "shaw" else 0,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        out_scale=out_scale,
      )

    self.self_attention = slot(
      self.self_mechanism, self.max_length, config.position
    )
    self.self_attention_norm = norm()
    if self.cross_mechanism is not None:
      self.cross_attention = slot(
        self.cross_mechanism, self.max_memory_length, "none"
      )
      self.cross_attention_norm = norm()
    self.mlp = Mlp(config, out_scale)
    self.mlp_norm = norm()
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    x: Float[Array, "B T F"],
    memory: Float[Array, "B S F"] | None = None,
    *,
    positions: Int[Array | np.ndarray, "1 T"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    memory_mask: Bool[Array, "B 1 1 S"] | None = None,
    is_causal: bool = False,
    deterministic: bool = True,
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B T F"]:
    """The layer on whole sequences; `tables` are for its self-attention."""
    return self._layer(
      x,
      lambda x: self.self_attention(
        x,
        positions=positions,
        deterministic=deterministic,
        mask=mask,
        is_causal=is_causal,
        **tables,
      ),
      lambda x: self.cross_attention(
        x, memory, deterministic=deterministic, mask=memory_mask
      ),
      deterministic,
    )

  def start(
    self, batch: int, max_length: int, memory: Float[Array, "B S F"] | None
  ) -> None:
    """Prepares `decode` of up to `max_length` positions."""
    self.self_attention.start(batch, max_length)
    if memory is not None:
      self.cross_attention.remember(memory)

  def decode(
    self,
    x: Float[Array, "B 1 F"],
    positions: Int[Array, "B 1"],
    memory_mask: Bool[Array, "B 1 1 S"] | None,
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B 1 F"]:
    """The layer on the next position."""
    return self._layer(
      x,
      lambda x: self.self_attention.decode(x, positions, **tables),
      lambda x: self.cross_attention.recall(x, memory_mask),
      deterministic=True,
    )

  def _layer(
    self,
    x: Array,
    attend: Callable[[Array], Array],
    attend_across: Callable[[Array], Array],
    deterministic: bool,
  ) -> Array:
    """The residual sub-layers, in order."""
    sublayers = [(self.self_attention_norm, attend)]
    if self.cross_mechanism is not None:
      sublayers.append((self.cross_attention_norm, attend_across))
    sublayers.append((self.mlp_norm, self.mlp))
    for norm, sublayer in sublayers:
      out = sublayer(norm(x) if self.config.norm == "pre" else x)
      x = x + self.dropout(out, deterministic=deterministic)
      if self.config.norm == "post":
        x = norm(x)
    return x
