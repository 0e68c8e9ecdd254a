"""The config of a recurrent encoder-decoder, which validates itself."""

from typing import ClassVar, Literal

from attention import Dims
from models.attention_config import AttentionConfig, AttentionFields
from models.config import Dtype
from settings.fields import Count, Rate, checked


@checked
class Seq2SeqConfig(AttentionFields):
  """A recurrent encoder and decoder with attention between them.

  Options that only a Transformer uses (positions, norms, feed-forward layers,
  self-attention) are not fields, so they raise an error.

  Attributes:
    kind: 'seq2seq'.
    cell: 'gru' (Cho) or 'lstm' (Hochreiter and Schmidhuber).
    decoder: 'bahdanau' uses the state before a step as the query and feeds the context
      to the cell; 'luong' uses the state after the step and feeds the output to the
      next step.
    num_layers: layers of the encoder, and of the decoder.
    num_heads: N; states and annotations are split into N heads. The papers have 1.
    features: width of states and annotations; the head dimension is
      features / N, and a direction of the encoder has features / 2.
    dropout_rate: rate of dropout for embeddings, between layers and before the softmax,
      but not between states.
    tie_embeddings: whether the softmax shares the target's embedding table, and also
      the source's if they share a vocabulary.
    dtype: dtype of activations; states, logits and softmax are always float32.
    param_dtype: dtype of parameters.
    cross_attention: mechanism of the attention from decoder to encoder; None is dense,
      which is Luong's dot product with a scale.
  """

  module: ClassVar[str] = "projects.seq2seq.model:create"
  attention_fields: ClassVar[tuple[str, ...]] = ("cross_attention",)

  kind: Literal["seq2seq"] = "seq2seq"
  cell: Literal["gru", "lstm"]
  decoder: Literal["bahdanau", "luong"]
  num_layers: Count
  features: Count
  num_heads: Count = 1
  dropout_rate: Rate = 0.0
  tie_embeddings: bool = True
  dtype: Dtype = "float32"
  param_dtype: Dtype = "float32"
  cross_attention: AttentionConfig | None = None

  def __post_init__(self):
    for divisor, name in (
      (self.num_heads, f"num_heads {self.num_heads}"),
      (2, "2, the directions of the encoder"),
    ):
      if self.features % divisor:
        raise ValueError(
          f"features: {self.features} is not divisible by {name}"
        )
    self.fill_attention_fields()

  @property
  def layout(self) -> str:
    """The batch layout of an encoder-decoder."""
    return "encoder_decoder"

  def dims(self, max_length: int) -> Dims:
    """The sizes from which a mechanism creates its variables."""
    heads = self.num_heads
    return Dims(heads, heads, self.query_dim, max_length, self.features)

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of the single attention module."""
    return self.attentions[field]

  @property
  def query_dim(self) -> int:
    """H."""
    return self.features // self.num_heads

  @property
  def kv_heads(self) -> int:
    """K, equal to N."""
    return self.num_heads
