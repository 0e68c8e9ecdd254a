"""How much of what, checked."""

import dataclasses

from projects.gato import captions, control
from settings.checks import check
from tasks import vocabularies


@dataclasses.dataclass(frozen=True)
class MixedConfig:
  """Which text, and how many rows of a batch are captions and control.

  Attributes:
    path: a UTF-8 file; its first 90 % are trained, the rest is held out.
    context: T, tokens of a row.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text and on captions.
    vocab_size: subwords, special tokens included.
    tokenizer: a `tokenizer.json`, or a folder that has one; used as it is, in
      place of `vocabulary` and `vocab_size`.
    caption_rows: rows of a training batch that are an image and its caption.
    control_rows: rows that are a stretch of an episode of CartPole. The other
      rows are text.
    max_shapes: shapes in an image at most.
    expert_episodes: episodes that the expert plays for training.
    eval_size: held-out captions, and held-out stretches of episodes.
    eval_batches: batches of text of one evaluation; 0 takes all held-out text.
    play_episodes: episodes that are played at the end of a run.
  """

  path: str = ""
  context: int = 64
  vocabulary: vocabularies.Kind = "subwords"
  vocab_size: int = 512
  tokenizer: str = ""
  caption_rows: int = 16
  control_rows: int = 16
  max_shapes: int = 3
  expert_episodes: int = 200
  eval_size: int = 500
  eval_batches: int = 0
  play_episodes: int = 100

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")
    vocabularies.check_leaves(self)
    for field in ("caption_rows", "control_rows", "eval_batches"):
      check(self, field, getattr(self, field) >= 0, "0 or more")
    for field in ("expert_episodes", "eval_size", "play_episodes"):
      check(self, field, getattr(self, field) >= 1, "at least 1")
    most = len(captions.PLACES)
    check(self, "max_shapes", 1 <= self.max_shapes <= most, f"1 to {most}")
    least = max(2, control.STEP_TOKENS if self.control_rows else 2)
    check(self, "context", self.context >= least, f"at least {least} tokens")
