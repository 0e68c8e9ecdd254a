"""The options of the text task, checked."""

from typing import Annotated

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from settings.checks import check
from settings.fields import STRICT, Count, Whole
from tasks import vocabularies


@dataclass(frozen=True, config=STRICT)
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
  context: Annotated[int, Ge(2)] = 256
  eval_batches: Whole = 0
  vocabulary: vocabularies.Kind = "characters"
  vocab_size: Count = 1024
  tokenizer: str = ""
  # Beyond it hardly anything is left to predict from.
  mask_rate: Annotated[float, Interval(gt=0, le=0.9)] = 0.15
  mean_span_length: Annotated[float, Ge(1)] = 3.0

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")
