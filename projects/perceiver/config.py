"""The config of a Perceiver IO, which checks itself."""

from typing import ClassVar, Literal, NamedTuple

from models.attention_config import (
  AttentionConfig,
  AttentionFields,
  Layers,
  names,
)
from models.config import Activation, Dtype
from settings.fields import Count, Rate, check, checked


class Widths(NamedTuple):
  """Sizes of an attention module and of the feed-forward layer after it.

  Attributes:
    num_heads: N.
    query: of queries and keys, over all heads.
    value: of values, over all heads.
    mlp: inside the feed-forward layer.
  """

  num_heads: int
  query: int
  value: int
  mlp: int


@checked
class PerceiverConfig(AttentionFields):
  """Latents that read inputs of any length, and output queries that read the latents.

  A width that is None follows from another one, which its line names.

  Attributes:
    kind: 'perceiver'.
    num_latents: M.
    num_layers: layers in which latents attend among themselves.
    num_blocks: how many times all of these are passed, with the same weights.
    num_heads: of these layers.
    features: width of a latent.
    mlp_features: width inside their feed-forward layers.
    activation: of all feed-forward layers, as in `ModelConfig`.
    query_features: width of their queries and keys, over all heads; `features`.
    value_features: width of their values, over all heads; `features`.
    input_features: width of an input, and of an embedding.
    input_heads: heads with which latents attend to inputs.
    input_query_features: as `query_features`, there; `input_features`.
    input_value_features: as `value_features`, there; `features`.
    input_mlp_features: as `mlp_features`, of the layer there; `features`.
    input_residual: whether the latents are added to what they read.
    output_features: width of an output query; `input_features` with head
      'tokens', else `features`.
    output_heads: heads with which outputs attend to latents.
    output_query_features: as `query_features`, there; `output_features`.
    output_value_features: as `value_features`, there; `output_features`.
    output_mlp_features: as `mlp_features`, of the layer there;
      `output_features`.
    output_residual: whether the output queries are added to what they read.
    fourier_bands: K, frequencies of the positions of pixels along each axis;
      None reads tokens, whose positions are learned.
    head: 'tokens', an output for each position, its logits products with the
      table of embeddings; or 'class', one output and its classes.
    dropout_rate: of what an attention or a feed-forward layer gives.
    vocab_size: ids that the model knows, if more than its task has.
    max_length: the longest sequence, if longer than its task's.
    dtype: of activations; logits and softmax are float32, or float64 like it.
    param_dtype: of parameters.
    encoder_attention: mechanism among the latents, or several that layers take
      in turn; None is dense.
    cross_attention: from latents to inputs and from outputs to latents; a list
      has one for each.
  """

  module: ClassVar[str] = "projects.perceiver.model:create"
  attention_fields: ClassVar[tuple[str, ...]] = (
    "encoder_attention",
    "cross_attention",
  )

  kind: Literal["perceiver"] = "perceiver"
  num_latents: Count
  num_layers: Count
  num_blocks: Count = 1
  num_heads: Count
  features: Count
  mlp_features: Count
  activation: Activation = "gelu"
  query_features: Count | None = None
  value_features: Count | None = None
  input_features: Count
  input_heads: Count = 1
  input_query_features: Count | None = None
  input_value_features: Count | None = None
  input_mlp_features: Count | None = None
  input_residual: bool = True
  output_features: Count | None = None
  output_heads: Count = 1
  output_query_features: Count | None = None
  output_value_features: Count | None = None
  output_mlp_features: Count | None = None
  output_residual: bool = True
  fourier_bands: Count | None = None
  head: Literal["tokens", "class"] = "tokens"
  dropout_rate: Rate = 0.0
  vocab_size: Count | None = None
  max_length: Count | None = None
  dtype: Dtype = "float32"
  param_dtype: Dtype = "float32"
  encoder_attention: Layers | None = None
  cross_attention: Layers | None = None

  def __post_init__(self):
    self._check_widths()
    self.fill_attention_fields()
    if len(self.attentions["cross_attention"]) > 2:
      raise ValueError(
        "cross_attention: expected at most 2 mechanisms, from latents to inputs "
        "and from outputs to latents, got "
        + names(self.attentions["cross_attention"])
      )

  @property
  def layout(self) -> str:
    """The batch layout that it reads."""
    return "encoder"

  @property
  def latents(self) -> Widths:
    """Sizes of the self-attention layers of the latents."""
    return Widths(
      self.num_heads,
      self.query_features or self.features,
      self.value_features or self.features,
      self.mlp_features,
    )

  @property
  def inputs(self) -> Widths:
    """Sizes of the layer from latents to inputs."""
    return Widths(
      self.input_heads,
      self.input_query_features or self.input_features,
      self.input_value_features or self.features,
      self.input_mlp_features or self.features,
    )

  @property
  def outputs(self) -> Widths:
    """Sizes of the layer from outputs to latents."""
    width = self.output_width
    return Widths(
      self.output_heads,
      self.output_query_features or width,
      self.output_value_features or width,
      self.output_mlp_features or width,
    )

  @property
  def output_width(self) -> int:
    """The width of an output query."""
    width = self.input_features if self.head == "tokens" else self.features
    return self.output_features or width

  @property
  def query_dim(self) -> int:
    """H of the latents."""
    return self.latents.query // self.num_heads

  @property
  def kv_heads(self) -> int:
    """K, equal to N."""
    return self.num_heads

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of every layer for the attention module `field`."""
    number = 2 if field == "cross_attention" else self.num_layers
    chosen = self.attentions[field]
    return tuple(chosen[i % len(chosen)] for i in range(number))

  def _check_widths(self):
    for prefix, widths in (
      ("", self.latents),
      ("input_", self.inputs),
      ("output_", self.outputs),
    ):
      heads = f"{prefix}heads" if prefix else "num_heads"
      for name in ("query", "value"):
        width = getattr(widths, name)
        if width % widths.num_heads:
          raise ValueError(
            f"{prefix}{name}_features: {width} is not divisible by {heads} "
            f"{widths.num_heads}"
          )
    if self.head == "tokens":
      check(
        self,
        "output_features",
        self.output_width == self.input_features,
        f"input_features {self.input_features}, the width of the table of "
        "embeddings that head 'tokens' shares",
      )
    if self.fourier_bands is not None:
      check(self, "head", self.head == "class", "'class' with fourier_bands")
      for field in ("vocab_size", "max_length"):
        check(
          self,
          field,
          getattr(self, field) is None,
          "None in a model that reads images (fourier_bands)",
        )
