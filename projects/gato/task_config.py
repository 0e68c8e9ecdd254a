"""The config of the mixed task: amounts of text, captions and control."""

from typing import Annotated

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from projects.gato import captions, control
from settings.fields import STRICT, Count, Whole, check
from tasks import vocabularies


@dataclass(frozen=True, config=STRICT)
class MixedConfig:
  """The text, and the number of caption and control rows of a batch.

  Attributes:
    path: a UTF-8 file; its first 90 % are for training, and the rest is held out.
    context: T, the number of tokens of a row.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text and on captions.
    vocab_size: number of subwords, with special tokens.
    tokenizer: a `tokenizer.json`, or a folder that has one; replaces `vocabulary`
      and `vocab_size`.
    caption_rows: number of rows of a training batch with an image and its caption.
    control_rows: number of rows with a window of an episode of CartPole. The other
      rows are text.
    max_shapes: largest number of shapes in an image.
    expert_episodes: number of episodes that the expert plays for training.
    eval_size: number of held-out captions, and of held-out windows of episodes.
    eval_batches: batches of text of one evaluation; 0 means all held-out text.
    play_episodes: number of episodes that are played at the end of a run.
  """

  path: str = ""
  context: Annotated[int, Ge(2)] = 64
  vocabulary: vocabularies.Kind = "subwords"
  vocab_size: Count = 512
  tokenizer: str = ""
  caption_rows: Whole = 16
  control_rows: Whole = 16
  max_shapes: Annotated[int, Interval(ge=1, le=len(captions.QUARTERS))] = 3
  expert_episodes: Count = 200
  eval_size: Count = 500
  eval_batches: Whole = 0
  play_episodes: Count = 100

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")
    minimum = control.STEP_TOKENS if self.control_rows else 2
    check(
      self, "context", self.context >= minimum, f"at least {minimum} tokens"
    )
