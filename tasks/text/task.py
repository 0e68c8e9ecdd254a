"""Shared code of the text objectives: tokens, positions and metrics."""

import abc
from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Rate, Whole, check
from tasks import base, vocabularies
from tasks.base import Batch
from tasks.text.ngrams import Pairs, ngram_losses
from tasks.text.stored import Parts
from tasks.vocabularies import Vocabulary

NUM_SAMPLES = 4
"""Number of samples of the held-out text that are decoded at the end of a run."""

_MAX_COUNTED = 2**24
"""Number of training tokens that `baselines` counts in a text on disk."""


@dataclass(frozen=True, config=STRICT)
class TextConfig:
  """The text, its tokens and the lengths of its pieces.

  Attributes:
    path: a file, a pattern such as 'data/*.txt', or a comma-separated list; each file
      is read once. The first 90 % are for training, and the rest is held out. Files are
      plain UTF-8, .jsonl, .csv or .parquet, or .npy or .bin files of ids.
    column: column or key that has the text, in files with columns; '' is 'text'.
    test_share: share of the held-out text, from its end, for the split 'test', which is
      never used for selection; the rest is 'validation'.
    context: number of tokens that the model reads: T of a decoder, S of an encoder.
    eval_batches: batches of one evaluation; 0 means all of the held-out text.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text; 'ids' for a file of ids.
    vocab_size: number of subwords, with special tokens, or of 'ids' without them.
    tokenizer: a `tokenizer.json`, the `characters.json` of a run, or a folder
      that has one of them; replaces `vocabulary` and `vocab_size`.
    mask_rate: share of tokens that an encoder or an encoder-decoder predicts; a
      decoder predicts all.
    mean_span_length: mean number of tokens of a span that an encoder-decoder
      predicts.
  """

  path: str = ""
  column: str = ""
  test_share: Rate = 0.0
  context: Annotated[int, Ge(2)] = 256
  eval_batches: Whole = 0
  vocabulary: vocabularies.Kind | Literal["ids"] = "characters"
  vocab_size: Count = 1024
  tokenizer: str = ""
  # Higher rates leave hardly any context.
  mask_rate: Annotated[float, Interval(gt=0, le=0.9)] = 0.15
  mean_span_length: Annotated[float, Ge(1)] = 3.0

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")


class TextTask(base.Task):
  """Pieces of a text, in which some tokens are predicted.

  A subclass is an objective: it defines the batches and the special tokens that it
  needs. A text has no end, so EOS is a target only if the objective adds it.

  Attributes:
    objective: name of the objective, for messages.

  `parts` is None for a restored task, which only encodes and decodes.
  """

  objective: str

  def __init__(
    self,
    config: TextConfig,
    vocabulary: Vocabulary,
    parts: Parts | None,
    *,
    batch_size: int,
    seed: int,
  ):
    self._config = config
    self._vocabulary = vocabulary
    self._batch_size = batch_size
    self._seed = seed
    self.target_vocab_size = vocabulary.size
    self.pad_id = self._need("pad")
    self.bos_id = self._need("bos")
    self._held_out: dict[str, np.ndarray] = {}
    self._characters: dict[str, np.ndarray | None] = {}
    if parts is not None:
      self._train, held_out, characters = parts
      cut = len(held_out) - int(len(held_out) * config.test_share)
      splits = {"validation": slice(cut)}
      if config.test_share:
        splits["test"] = slice(cut, None)
      for split, part in splits.items():
        self._held_out[split] = held_out[part]
        self._characters[split] = (
          None if characters is None else characters[part]
        )
    self.eval_splits = tuple(self._held_out)
    self._ngram_losses: dict[str, Mapping[str, float]] = {}

  @classmethod
  def own_tokens(cls, config: TextConfig) -> tuple[str, ...]:
    """Names of the special tokens that this objective adds to a vocabulary.

    By default it adds none.
    """
    del config
    return ()

  @property
  @abc.abstractmethod
  def piece(self) -> int:
    """The number of text tokens in one example."""

  def _held_out_batch(
    self,
    text: np.ndarray,
    starts: np.ndarray,
    example: Callable[[np.ndarray, np.random.Generator], Batch],
  ) -> Batch:
    """A batch of held-out pieces; its random numbers depend only on their positions."""
    rows = [
      example(
        np.asarray(text[None, start : start + self.piece], np.int32),
        # Seeds of training steps have no third number.
        np.random.default_rng((0, int(start), 1)),
      )
      for start in starts
    ]
    batch = {
      name: np.concatenate([row[name] for row in rows]) for name in rows[0]
    }
    return base.pad_rows(batch, self._batch_size)

  def _training_pairs(self) -> Pairs:
    """The pairs that `baselines` counts."""
    return Pairs.from_text(self._counted_text)

  @property
  def _counted_text(self) -> np.ndarray:
    """The training text, int32; only `_MAX_COUNTED` tokens of a text on disk."""
    is_mapped = isinstance(self._train, np.memmap)
    text = self._train[:_MAX_COUNTED] if is_mapped else self._train
    return np.asarray(text, np.int32)

  @abc.abstractmethod
  def _predicted(self, batch: Batch) -> Pairs:
    """The tokens of a batch that have a weight, with their left neighbours."""

  def tokens(self, split: str) -> np.ndarray:
    """The ids of a held-out split."""
    return self._held_out[split]

  @property
  def baselines(self) -> Mapping[str, float]:
    """Unigram and bigram losses, on the targets of the loss.

    Empty for a restored task.
    """
    return self._counted_losses(self.eval_splits[0]) if self.eval_splits else {}

  def _counted_losses(self, split: str) -> Mapping[str, float]:
    if split not in self._ngram_losses:
      batches = self.eval_batches(split)
      held_out = Pairs.join([self._predicted(batch) for batch in batches])
      self._ngram_losses[split] = ngram_losses(
        self._training_pairs(), held_out, self.target_vocab_size
      )
    return self._ngram_losses[split]

  def summarize(
    self, sums: Mapping[str, tuple[float, float]], split: str | None = None
  ) -> dict[str, float]:
    """Divides sums by counts, and adds the n-gram losses of the split."""
    losses = self._counted_losses(split) if split else self.baselines
    return {**base.divide(sums), **losses}

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Token accuracy."""
    accuracy = base.token_accuracy(logits, batch["targets"], batch["weights"])
    return {"token_accuracy": accuracy}

  def encode_target(self, line: str) -> list[int]:
    """Ids of a line, without EOS, because a text does not end."""
    return self._vocabulary.encode(line)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS."""
    return self._vocabulary.decode(ids)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id, with visible spaces and line ends."""
    return self._vocabulary.labels(ids)

  def save(self, directory: pathlib.Path) -> None:
    """Writes the vocabulary."""
    vocabularies.save_vocabulary(self._vocabulary, directory)

  def _need(self, role: str) -> int:
    """The id of a special token, or DataError."""
    return self._vocabulary.special.need(
      role, self._vocabulary.file, self.objective
    )

  def _check_length(self, ids: list[int], limit: int) -> list[int]:
    """Returns the ids of a user's line; ValueError if there are too many."""
    if len(ids) > limit:
      raise ValueError(
        f"expected at most {limit} {self._vocabulary.unit} (task.context="
        f"{self._config.context}), got {len(ids)}"
      )
    return ids

  def _windows(
    self,
    rng: np.random.Generator,
    length: int,
    rows: np.ndarray | None = None,
  ) -> np.ndarray:
    """Windows of the training text from random positions, [B, length]."""
    starts = rng.integers(len(self._train) - length + 1, size=self._batch_size)
    if rows is not None:
      starts = starts[rows]
    windows = self._train[starts[:, None] + np.arange(length)]
    return np.asarray(windows, np.int32)

  def _starts(self, stop: int) -> list[np.ndarray]:
    """Start positions of the pieces before `stop`, one array per batch."""
    count = -(-max(stop, 0) // self.piece)
    batches = [*base.chunks(count, self._batch_size)]
    batches = batches[: self._config.eval_batches or None]
    return [pieces * self.piece for pieces in batches]
