"""What turns ids into the features that the first layer reads."""

import dataclasses

from settings.checks import check, check_ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
  """Tables of tokens, types and learned positions; by default Vaswani's.

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

  Raises:
    ValueError: a value that cannot work; the message starts with the field.
  """

  embedding_scale: float | None = None
  embedding_norm: bool = False
  token_types: int = 0
  tie_inputs: bool | None = None
  position_offset: int = 0
  position_padding: int | None = None
  vocab_size: int | None = None
  max_length: int | None = None

  def __post_init__(self):
    check_ranges(self, counts=("vocab_size", "max_length"), rates=())
    for field in ("token_types", "position_offset"):
      check(self, field, getattr(self, field) >= 0, "0 or more")
    if self.position_padding is not None and self.position_offset < 1:
      raise ValueError(
        "position_padding: expected position_offset of at least 1 with it, got "
        f"{self.position_offset}"
      )
