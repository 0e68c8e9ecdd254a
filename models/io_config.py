"""What is before the first layer of a Transformer, and after the last."""

from settings.fields import Count, Positive, Whole, checked


@checked
class EmbeddingConfig:
  """What turns ids into features; by default the tables of Vaswani.

  Attributes:
    embedding_scale: factor of embeddings; None is √F (Vaswani).
    embedding_norm: whether the sum of embeddings is normalised (BERT).
    token_types: size of a table of token types, such as BERT's two segments; 0
      has none.
    tie_inputs: encoder and decoder read one table where the vocabulary is
      shared; None is as `tie_embeddings`.
    position_offset: position of the first token, of 'learned'.
    position_padding: an id that does not count and is at `position_offset` − 1
      (RoBERTa); None counts every position.
    vocab_size: ids that the model knows, if more than its task has.
    max_length: the longest sequence, if longer than its task's.
  """

  embedding_scale: float | None = None
  embedding_norm: bool = False
  token_types: Whole = 0
  tie_inputs: bool | None = None
  position_offset: Whole = 0
  position_padding: int | None = None
  vocab_size: Count | None = None
  max_length: Count | None = None

  def __post_init__(self):
    if self.position_padding is not None and self.position_offset < 1:
      raise ValueError(
        "position_padding: expected position_offset of at least 1 with it, got "
        f"{self.position_offset}"
      )


@checked
class HeadConfig:
  """What a head has beside its table or matrix; by default nothing.

  Attributes:
    mean_pooling: classes are those of the mean of all tokens, not of the first.
    pooler: a layer with tanh before the classes (BERT).
    head_transform: a layer with activation and norm before the logits of tokens
      (BERT) or of classes (ModernBERT).
    transform_bias: whether that layer has a bias.
    transform_activation: of that layer; None is that of the feed-forward layers.
    head_bias: whether logits have a bias.
    logit_scale: factor of what the softmax's table is multiplied with.
    logit_soft_cap: c; logits x of tokens become c · tanh(x / c) (Gemma 2). None
      caps nothing; attention has `logits_soft_cap` of its own.
  """

  mean_pooling: bool = False
  pooler: bool = False
  head_transform: bool = False
  transform_bias: bool = True
  transform_activation: str | None = None
  head_bias: bool = False
  logit_scale: float = 1.0
  logit_soft_cap: Positive | None = None
