"""The config of a Perceiver IO, which validates itself."""

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
    query: total width of queries and keys over all heads.
    value: total width of values over all heads.
    mlp: hidden width of the feed-forward layer.
  """

  num_heads: int
  query: int
  value: int
  mlp: int


@checked
class PerceiverConfig(AttentionFields):
  """Latents that attend to inputs of any length, and outputs that attend to latents.

  A width of None defaults to another width, which is given for each.

  Attributes:
    kind: 'perceiver'.
    num_latents: M.
    num_layers: number of self-attention layers of the latents.
    num_blocks: number of times that these layers are applied, with shared weights.
    num_heads: heads of these layers.
    features: width of a latent.
    mlp_features: hidden width of their feed-forward layers.
    activation: activation of all feed-forward layers, as in `ModelConfig`.
    query_features: total width of their queries and keys; default `features`.
    value_features: total width of their values; default `features`.
    input_features: width of an input, and of an embedding.
    input_heads: heads of the attention from latents to inputs.
    input_query_features: `query_features` of that attention; default
      `input_features`.
    input_value_features: `value_features` of that attention; default `features`.
    input_mlp_features: `mlp_features` of that layer; default `features`.
    input_residual: whether the latents are added to the output of that attention.
    output_features: width of an output query; default `input_features` with head
      'tokens', else `features`.
    output_heads: heads of the attention from outputs to latents.
    output_query_features: `query_features` of that attention; default
      `output_features`.
    output_value_features: `value_features` of that attention; default
      `output_features`.
    output_mlp_features: `mlp_features` of that layer; default `output_features`.
    output_residual: whether the output queries are added to the output of that
      attention.
    fourier_bands: K, the number of frequencies of pixel positions along each axis;
      None means tokens with learned positions.
    head: 'tokens', one output per position, whose logits are products with the
      embedding table; or 'class', one output for the classes.
    dropout_rate: rate of dropout after attention and feed-forward layers.
    vocab_size: size of the vocabulary, if larger than the task's.
    max_length: the largest length, if larger than the task's.
    dtype: dtype of activations; logits and softmax are float32, or float64 with dtype
      'float64'.
    param_dtype: dtype of parameters.
    encoder_attention: self-attention mechanism of the latents, or several that layers
      take in turn; None is dense.
    cross_attention: mechanism of the attention from latents to inputs and from outputs
      to latents; a list of two sets them separately.
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
    """The batch layout of an encoder."""
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
    """Sizes of the layer in which latents attend to inputs."""
    return Widths(
      self.input_heads,
      self.input_query_features or self.input_features,
      self.input_value_features or self.features,
      self.input_mlp_features or self.features,
    )

  @property
  def outputs(self) -> Widths:
    """Sizes of the layer in which outputs attend to latents."""
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
    """The mechanism of each layer to which the field applies."""
    number = 2 if field == "cross_attention" else self.num_layers
    mechanisms = self.attentions[field]
    return tuple(mechanisms[i % len(mechanisms)] for i in range(number))

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
