"""The options of the text task, checked."""

import dataclasses

from settings.checks import check
from tasks import vocabularies


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """Which text, in which tokens, in pieces of which length.

  Attributes:
    path: a UTF-8 file; its first 90 % are trained, the rest is held out.
    context: tokens that the model reads: T of a decoder, S of an encoder.
    eval_batches: batches of one evaluation; 0 takes the whole held-out text.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text.
    vocab_size: subwords, special tokens included.
    tokenizer: a `tokenizer.json`, the `characters.json` of a run, or a folder
      that has one of them; used as it is, in place of `vocabulary` and
      `vocab_size`.
    mask_rate: share of tokens that an encoder or an encoder-decoder has to
      predict; a decoder predicts all.
    mean_span_length: tokens of a span that an encoder-decoder predicts.
  """

  path: str = ""
  context: int = 256
  eval_batches: int = 0
  vocabulary: vocabularies.Kind = "characters"
  vocab_size: int = 1024
  tokenizer: str = ""
  mask_rate: float = 0.15
  mean_span_length: float = 3.0

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")
    check(self, "context", self.context >= 2, "at least 2 tokens")
    check(self, "eval_batches", self.eval_batches >= 0, "0 or more")
    vocabularies.check_leaves(self)
    # Beyond it hardly anything is left to predict from.
    check(
      self, "mask_rate", 0 < self.mask_rate <= 0.9, "above 0 and at most 0.9"
    )
    check(
      self, "mean_span_length", self.mean_span_length >= 1, "at least 1 token"
    )
