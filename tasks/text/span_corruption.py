"""Span corruption for an encoder-decoder (T5)."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tasks import base
from tasks.base import Batch, DecodeBatch
from tasks.special_tokens import sentinel
from tasks.text.ngrams import Pairs
from tasks.text.task import NUM_SAMPLES, TextConfig, TextTask

_ROWS = 4096
"""Number of pieces that are counted at a time."""


class SpanSizes(NamedTuple):
  """The sizes that follow from the length of a piece.

  Attributes:
    text: number of tokens of the piece, L.
    noise: number of predicted tokens.
    spans: number of spans of predicted tokens.
  """

  text: int
  noise: int
  spans: int

  @classmethod
  def from_length(cls, text: int, rate: float, mean_span: float) -> "SpanSizes":
    """T5's sizes, with at least one masked token, one span and one visible token.

    There are never more spans than visible tokens, which separate the spans.
    """
    noise = min(max(round(text * rate), 1), text - 1)
    spans = min(max(round(noise / mean_span), 1), text - noise)
    return cls(text, noise, spans)

  @property
  def source(self) -> int:
    """Number of encoder tokens: the visible tokens, sentinels and EOS."""
    return self.text - self.noise + self.spans + 1

  @property
  def target(self) -> int:
    """Number of decoder tokens: spans, sentinels, the last sentinel and EOS."""
    return self.noise + self.spans + 2


def fitting_sizes(config: TextConfig) -> SpanSizes:
  """The sizes of the longest piece whose source fits the context.

  Raises:
    ValueError: even the shortest piece, of two tokens, does not fit.
  """

  def sizes(text: int) -> SpanSizes:
    return SpanSizes.from_length(
      text, config.mask_rate, config.mean_span_length
    )

  # At least a tenth of the tokens stays visible, so longer pieces cannot fit. The
  # length of the source never decreases with that of the text.
  lengths = range(2, 10 * config.context + 20)
  fitting = bisect.bisect_right(
    lengths, config.context, key=lambda text: sizes(text).source
  )
  if not fitting:
    raise ValueError(
      f"task.context: expected at least {sizes(2).source} tokens: a visible token, "
      f"a sentinel and EOS, got {config.context}"
    )
  return sizes(lengths[fitting - 1])


def span_mask(
  rng: np.random.Generator, rows: int, sizes: SpanSizes
) -> np.ndarray:
  """Draws the predicted tokens of each row, [B, L] bool.

  This is `random_spans_noise_mask` of T5: the visible and the predicted tokens are
  each divided into `spans` segments, uniformly at random, and the segments alternate,
  starting with a visible one.

  Args:
    rng: random number generator.
    rows: B.
    sizes: sizes of a row.

  Cost: O(B L log L) time, O(B L) memory.

  Paper: Exploring the limits of transfer learning with a unified text-to-text
  Transformer, section 3.1.4, arXiv:1910.10683.
  """
  visible = _segments(rng, rows, sizes.text - sizes.noise, sizes.spans)
  noise = _segments(rng, rows, sizes.noise, sizes.spans)
  lengths = np.stack([visible, noise], axis=2).reshape(rows, -1)
  starts = np.zeros((rows, sizes.text), np.int32)
  np.put_along_axis(starts, np.cumsum(lengths, axis=1)[:, :-1], 1, axis=1)
  # Segments are numbered from 0; those with an odd number are predicted.
  return np.cumsum(starts, axis=1) % 2 == 1


def corrupt(
  tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray, eos_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Splits texts into the encoder's source and the decoder's target.

  In the source a sentinel replaces each span. The target has each sentinel followed
  by its span, and a last sentinel, as in the paper's figure 2 (T5's code omits the
  last one). Both end in EOS.

  Args:
    tokens: [B, L] ids.
    mask: [B, L] bool; each row has the same number of spans and of True.
    sentinels: ids, one more than there are spans.
    eos_id: id of EOS.

  Returns:
    Source and target, [B, S] and [B, T] int32.
  """
  source = _replace_spans(tokens, mask, sentinels)
  target = _replace_spans(tokens, ~mask, sentinels)
  end = np.full((len(tokens), 1), eos_id, np.int32)
  spans = int(_span_starts(mask)[0].sum())
  last = np.full_like(end, sentinels[spans])
  return np.hstack([source, end]), np.hstack([target, last, end])


class SpanText(TextTask):
  """Pieces of a text with removed spans, which the decoder predicts.

  encoder_decoder: source [B, S] and target [B, T] from `corrupt`. Every training step
  draws from (seed, step). The held-out text is divided into pieces of equal length; the
  last one may be shorter, and is omitted if it has only one token. The spans are the
  same in every evaluation of every run.
  """

  objective = "span corruption"
  shared_vocabulary = True

  def __init__(self, config: TextConfig, vocabulary, *args, **options):
    super().__init__(config, vocabulary, *args, **options)
    self.eos_id = self._need("eos")
    self._sizes = fitting_sizes(config)
    self._sentinels = np.array(
      vocabulary.special.need_sentinels(
        self._sizes.spans + 1, vocabulary.file, self.objective
      ),
      np.int32,
    )
    self.source_vocab_size = self.target_vocab_size
    self.max_source_length = self._sizes.source
    self.max_target_length = self._sizes.target

  @classmethod
  def own_tokens(cls, config: TextConfig) -> tuple[str, ...]:
    """Sentinels: one for each span, and the last one."""
    count = fitting_sizes(config).spans + 1
    return tuple(sentinel(number) for number in range(count))

  @property
  def piece(self) -> int:
    """L, the number of text tokens in one example."""
    return self._sizes.text

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B corrupted pieces from random positions, drawn from (seed, step)."""
    rng = np.random.default_rng((self._seed, step))
    tokens = self._windows(rng, self.piece)
    batch = self._batch(tokens, span_mask(rng, len(tokens), self._sizes))
    return base.select_rows(batch, rows)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields the held-out text in order, each token in one source or target."""
    text = self.tokens(split)
    for starts in self._starts(len(text) - 1):
      yield self._held_out_batch(text, starts, self._held_out_row)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields a few pieces with removed spans; the references are these spans."""
    text = self.tokens(split)
    count = min(len(text) // self.piece, NUM_SAMPLES, self._batch_size)
    if not count:
      return
    starts = np.arange(count) * (len(text) // self.piece // count) * self.piece
    batch = self._held_out_batch(text, starts, self._held_out_row)
    source = batch["source"][base.repeat_rows(count, self._batch_size)]
    references = [self.decode(row) for row in batch["targets"][:count]]
    yield DecodeBatch({"source": source}, references, self.max_target_length)

  def encode(self, line: str) -> list[int]:
    """Ids of a line and EOS; recognises the names of sentinels."""
    ids = [*self._vocabulary.encode(line), self.eos_id]
    return self._check_length(ids, self._sizes.source)

  def encode_target(self, line: str) -> list[int]:
    """Ids of sentinels and spans, and EOS."""
    return [*self._vocabulary.encode(line), self.eos_id]

  def _held_out_row(
    self, tokens: np.ndarray, rng: np.random.Generator
  ) -> Batch:
    sizes = SpanSizes.from_length(
      tokens.shape[1], self._config.mask_rate, self._config.mean_span_length
    )
    return self._batch(tokens, span_mask(rng, 1, sizes))

  def _batch(self, tokens: np.ndarray, mask: np.ndarray) -> Batch:
    """Rows of one length, padded to S and T."""
    source, target = corrupt(tokens, mask, self._sentinels, self.eos_id)
    inputs = np.pad(
      target[:, :-1], ((0, 0), (1, 0)), constant_values=self.bos_id
    )
    sizes = self._sizes

    def pad(rows: np.ndarray, length: int) -> np.ndarray:
      widths = (0, 0), (0, length - rows.shape[1])
      return np.pad(rows, widths, constant_values=self.pad_id)

    source_mask = np.arange(sizes.source) < source.shape[1]
    target_mask = np.arange(sizes.target) < target.shape[1]
    return {
      "source": pad(source, sizes.source),
      "source_mask": np.tile(source_mask, (len(tokens), 1)),
      "inputs": pad(inputs, sizes.target),
      "targets": pad(target, sizes.target),
      "weights": np.tile(target_mask.astype(np.float32), (len(tokens), 1)),
    }

  def _training_pairs(self) -> Pairs:
    """Pairs of enough targets to contain each training token about once."""
    text = self._counted_text
    count = len(text) // self.piece
    pieces = text[: count * self.piece].reshape(count, self.piece)
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(round(self._sizes.text / self._sizes.noise)):
      for first in range(0, count, _ROWS):
        rows = pieces[first : first + _ROWS]
        mask = span_mask(rng, len(rows), self._sizes)
        parts.append(self._predicted(self._batch(rows, mask)))
    return Pairs.join(parts)

  def _predicted(self, batch: Batch) -> Pairs:
    """Tokens with their left neighbours in the target, not in the text."""
    is_weighted = batch["weights"] > 0
    return Pairs(batch["inputs"][is_weighted], batch["targets"][is_weighted])


def _segments(
  rng: np.random.Generator, rows: int, items: int, segments: int
) -> np.ndarray:
  """Lengths of non-empty segments of a sequence, [B, segments]."""
  order = np.argsort(rng.random((rows, items - 1)), axis=1)
  cuts = 1 + np.sort(order[:, : segments - 1], axis=1)
  edges = np.pad(cuts, ((0, 0), (1, 1)))
  edges[:, -1] = items
  return np.diff(edges, axis=1)


def _span_starts(mask: np.ndarray) -> np.ndarray:
  """The start of each run of True, [B, L]."""
  left = np.pad(mask[:, :-1], ((0, 0), (1, 0)))
  return mask & ~left


def _replace_spans(
  tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray
) -> np.ndarray:
  """Replaces each run of True by a sentinel."""
  starts = _span_starts(mask)
  number = np.maximum(np.cumsum(starts, axis=1) - 1, 0)
  replaced = np.where(starts, sentinels[number], tokens)
  return replaced[~mask | starts].reshape(len(tokens), -1).astype(np.int32)
