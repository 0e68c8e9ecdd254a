"""Configs of the embeddings and of the head of a Transformer."""

from typing import Literal

from settings.fields import Count, Positive, Whole, checked


@checked
class EmbeddingConfig:
  """Embeddings of ids and positions; the defaults are those of Vaswani.

  Attributes:
    embedding_scale: factor of embeddings; None is √F (Vaswani).
    embedding_norm: whether the sum of embeddings is normalized (BERT).
    token_types: size of a table of token types, such as BERT's two segments; 0 means
      no table.
    embedding_dim: E, width of the embedding tables, which a linear layer maps to F;
      None is F. The head maps features to E before logits of tokens.
    projected: input of that layer: 'sum', the sum of embeddings after its norm, with
      a bias (ELECTRA), or 'tokens', before positions of width F are added (OPT).
    tie_inputs: whether encoder and decoder share one table if they share a
      vocabulary; None means the value of `tie_embeddings`.
    position_offset: position of the first token, with 'learned'.
    position_padding: an id that does not count as a position and has position
      `position_offset` − 1 (RoBERTa); None counts every id.
    position_skips_masked: whether masked inputs of a decoder do not count as positions
      and have position `position_offset` − 1 (OPT).
    vocab_size: size of the vocabulary, if larger than the task's.
    max_length: the largest length, if larger than the task's.
  """

  embedding_scale: float | None = None
  embedding_norm: bool = False
  token_types: Whole = 0
  embedding_dim: Count | None = None
  projected: Literal["sum", "tokens"] = "sum"
  tie_inputs: bool | None = None
  position_offset: Whole = 0
  position_padding: int | None = None
  position_skips_masked: bool = False
  vocab_size: Count | None = None
  max_length: Count | None = None

  def __post_init__(self):
    for name in ("position_padding", "position_skips_masked"):
      is_used = getattr(self, name) not in (None, False)
      if is_used and self.position_offset < 1:
        raise ValueError(
          f"{name}: expected position_offset of at least 1 with it, got "
          f"{self.position_offset}"
        )
    if self.embedding_dim is None and self.projected != "sum":
      raise ValueError(
        f"projected: expected embedding_dim with {self.projected!r}, got None"
      )


@checked
class HeadConfig:
  """Optional layers and biases of a head; by default none.

  Attributes:
    mean_pooling: whether classes are computed from the mean of all tokens instead of
      the first token.
    pooler: whether there is a layer with an activation before the classes (BERT).
    pooler_activation: the activation of that layer: 'tanh' (BERT), or one of those of
      the feed-forward layers.
    head_transform: whether there is a layer with activation and norm before the logits
      of tokens (BERT) or of classes (ModernBERT).
    transform_bias: whether that layer has a bias.
    transform_activation: the activation of that layer; None is that of the
      feed-forward layers.
    head_bias: whether logits have a bias.
    logit_scale: factor of the features before their product with the softmax's table.
    logit_soft_cap: c; logits x of tokens become c · tanh(x / c) (Gemma 2). None
      is no cap. The cap of attention logits is `logits_soft_cap`.
  """

  mean_pooling: bool = False
  pooler: bool = False
  pooler_activation: Literal[
    "tanh", "relu", "gelu", "gelu_tanh", "silu", "relu2"
  ] = "tanh"
  head_transform: bool = False
  transform_bias: bool = True
  transform_activation: str | None = None
  head_bias: bool = False
  logit_scale: float = 1.0
  logit_soft_cap: Positive | None = None
