"""Language modelling: a decoder predicts each token from the previous ones."""

from collections.abc import Iterator, Mapping, Sequence
import functools
import math

import numpy as np

from tasks import base
from tasks.base import Batch, DecodeBatch
from tasks.characters import Ids
from tasks.text.ngrams import Pairs
from tasks.text.task import NUM_SAMPLES, TextConfig, TextTask
from tasks.vocabularies import Vocabulary


class CausalText(TextTask):
  """Windows of a text, in which each token is predicted from the previous ones.

  decoder: inputs and targets [B, T], with targets one token later. Every token of
  the held-out text except the first is predicted exactly once. The tokens that the
  template of a tokenizer.json puts before a text replace the first token of each
  window.

  Attributes:
    prefix: ids at the start of each window and each prompt, such as BOS.
    eos_ids: ids that end a text, including `eos_id`.
  """

  objective = "language modelling"
  continues = True

  def __init__(self, config: TextConfig, *args, **options):
    super().__init__(config, *args, **options)
    self.eos_id = self._need("eos")
    self.eos_ids: tuple[int, ...] = (self.eos_id,)
    self.max_target_length = config.context
    self.prefix = getattr(self._vocabulary, "prefix", ())
    if len(self.prefix) >= max(2, config.context // 2):
      raise base.DataError(
        f"task.context: expected more than twice the {len(self.prefix)} tokens that "
        f"{self._vocabulary.file} puts before a text, got {config.context}"
      )

  @property
  def piece(self) -> int:
    """The number of text tokens in a window: T minus additional prefix tokens."""
    return self._config.context - max(0, len(self.prefix) - 1)

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B windows from random positions, drawn from (seed, step)."""
    rng = np.random.default_rng((self._seed, step))
    windows = self._windows(rng, self.piece + 1, rows)
    counts = np.full(len(windows), self.piece)
    return _batch(windows, counts, self.prefix)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields the held-out text in order; each token is predicted exactly once."""
    text = self.tokens(split)
    for starts in self._starts(len(text) - 1):
      counts = np.minimum(len(text) - 1 - starts, self.piece)
      positions = starts[:, None] + np.arange(self.piece + 1)
      # `_batch` clears the positions after the end; they have no weight.
      windows = text[np.minimum(positions, len(text) - 1)]
      batch = _batch(windows, counts, self.prefix)
      yield base.pad_rows(batch, self._batch_size)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields a few prompts from the text, with their continuations as references."""
    context, text = self._config.context, self.tokens(split)
    half = context // 2
    spacing = (len(text) - context) // NUM_SAMPLES
    count = min(NUM_SAMPLES, self._batch_size)
    if spacing < 1:
      return
    starts = np.arange(count) * spacing
    rows = np.asarray(text[starts[:, None] + np.arange(context)], np.int32)
    prompt = rows[base.repeat_rows(count, self._batch_size), :half]
    prompt[:, : len(self.prefix)] = self.prefix
    inputs = {
      "prompt": prompt,
      "prompt_length": np.full(self._batch_size, half, np.int32),
    }
    references = [self.decode(row[half:]) for row in rows]
    yield DecodeBatch(inputs, references, context - half)

  def summarize(
    self, sums: Mapping[str, tuple[float, float]], split: str | None = None
  ) -> dict[str, float]:
    """Adds bits per character, over all predicted tokens and their text.

    Characters are those of the text before any normalizer, or for a file of ids those of
    the decoded documents. Special tokens, such as the end of a document, have bits but no
    characters.
    """
    metrics = super().summarize(sums, split)
    if "loss" in metrics and not isinstance(self._vocabulary, Ids):
      bits = metrics["loss"] / math.log(2)
      characters = self._characters_per_token[split or self.eval_splits[0]]
      if characters:
        metrics["bits_per_character"] = bits / characters
    return metrics

  def encode(self, line: str) -> list[int]:
    """Prompt ids of a line; for an empty line, those of a line end."""
    ids = [*self.prefix, *self._vocabulary.encode(line or "\n")]
    return self._check_length(ids, self._config.context)

  @functools.cached_property
  def _characters_per_token(self) -> Mapping[str, float]:
    """Maps each split to its characters per predicted token."""

    def ratio(split):
      text, characters = self.tokens(split), self._characters[split]
      limit = len(text) - 1
      windows = sum(len(starts) for starts in self._starts(limit))
      count = min(windows * self.piece, limit)
      if characters is not None:
        return int(characters[1 : count + 1].sum(dtype=np.int64)) / count
      first, total = (
        count_characters(text[:end], self._vocabulary) for end in (1, count + 1)
      )
      return (total - first) / count

    return {split: ratio(split) for split in self.eval_splits}

  def _predicted(self, batch: Batch) -> Pairs:
    is_weighted = batch["weights"] > 0
    return Pairs(batch["inputs"][is_weighted], batch["targets"][is_weighted])


def count_characters(ids: np.ndarray, vocabulary: Vocabulary) -> int:
  """The number of characters that ids decode to, document by document.

  A special token ends a document and has no characters.
  """
  special = np.flatnonzero(~np.isin(ids, vocabulary.ordinary))
  starts, ends = [0, *(special + 1)], [*special, len(ids)]
  return sum(
    len(vocabulary.decode(ids[start:end]))
    for start, end in zip(starts, ends, strict=True)
  )


def _batch(
  windows: np.ndarray, counts: np.ndarray, prefix: Sequence[int]
) -> Batch:
  """Creates a batch of windows [B, n], whose first `counts` + 1 columns are text.

  A prefix replaces the first column, from which the second is predicted.
  """
  windows = np.asarray(windows, np.int32)
  if prefix:
    before = np.tile(np.array(prefix, np.int32), (len(windows), 1))
    windows = np.concatenate([before, windows[:, 1:]], axis=1)
  first = max(0, len(prefix) - 1)
  columns = np.arange(windows.shape[1] - 1)
  is_text = columns < first + counts[:, None]
  weights = is_text & (columns >= first)
  return {
    "inputs": windows[:, :-1] * is_text,
    "targets": windows[:, 1:] * is_text,
    "weights": weights.astype(np.float32),
  }
