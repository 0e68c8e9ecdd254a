"""Copying, reversing or duplicating random sequences: the smallest test of learning.

Sequences are computed from (seed, split, index) with a counter-based generator
(Philox; Salmon et al. 2011) and never stored.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import pathlib
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, check
from tasks import base, draws
from tasks.base import BOS, EOS, PAD, Batch, DecodeBatch
from tasks.generated import GeneratedTask, check_eval_lengths

SEP = 3
FIRST_SYMBOL = 4
_SPLITS = ("train", "validation")


@dataclass(frozen=True, config=STRICT)
class CopyConfig:
  """The sequences, and the operation on them.

  Attributes:
    kind: 'copy' repeats the sequence w, 'reverse' reverses it, and 'duplicate' is the
      `0w0w` of Kitaev et al. (2020), for decoders only: a separator before each w, and
      the loss on the second half. Its length is 2 · max_length + 2, so 511 symbols
      give the 1024 of the paper.
    vocab_size: number of symbols, written 0 … vocab_size − 1.
    min_length: shortest w; equal to `max_length` for a fixed length.
    max_length: longest w, in symbols.
    eval_lengths: lengths of w below `min_length` or above `max_length`; each is
      a split such as 'length_32', after 'validation', in which every w has that
      length. These splits are scored only by teacher forcing, where
      'sequence_accuracy' equals the exact match.
    eval_size: held-out sequences per split.
  """

  solved_at: ClassVar[float] = 0.95

  kind: Literal["copy", "reverse", "duplicate"] = "copy"
  vocab_size: Annotated[int, Ge(2)] = 32
  min_length: Count = 1
  max_length: Count = 16
  eval_lengths: tuple[int, ...] = ()
  eval_size: Count = 1000

  def __post_init__(self):
    check(
      self,
      "min_length",
      1 <= self.min_length <= self.max_length,
      f"1 to max_length={self.max_length}",
    )
    check_eval_lengths(self, 1, low="min_length", high="max_length")


class CopyTask(GeneratedTask):
  """Sequences to copy, in the layout for one kind of model.

  encoder_decoder: source = w EOS, targets = w' EOS, inputs = BOS w'.
  decoder: one stream `w SEP w' EOS` (duplicate: `SEP w SEP w EOS`), shifted by
    one, with weights on w' EOS only.
  encoder: source = w, targets = w', position by position.
  """

  def __init__(
    self, config: CopyConfig, *, kind: str, batch_size: int, seed: int
  ):
    supported = ("encoder_decoder", "decoder", "encoder")
    if config.kind == "duplicate":
      supported = ("decoder",)
    self._kind = base.layout(f"task.kind={config.kind!r}", kind, supported)
    super().__init__(
      config,
      itertools.chain(["|"], map(str, range(config.vocab_size))),
      batch_size=batch_size,
      seed=seed,
      length=config.max_length,
    )
    self.eval_splits = tuple(s for s in self.eval_splits if s != "test")
    if kind != "decoder":
      self.source_vocab_size = self.target_vocab_size
      self.max_source_length = self.max_target_length
      self.shared_vocabulary = True

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields the held-out sequences as prompts.

    Yields nothing for an encoder, or for lengths that are not trained.
    """
    if self._kind == "encoder" or split not in _SPLITS:
      return
    for indices in base.chunks(self._config.eval_size, self._batch_size):
      words, lengths = self._sequences(split, indices)
      answers, _ = self._answers(words, lengths)
      rows = base.repeat_rows(len(words), self._batch_size)
      words, lengths = words[rows], lengths[rows]
      if self._kind == "decoder":
        prompt = self._prompts(words, lengths)
        inputs = {
          "prompt": prompt,
          "prompt_length": self._prompt_length(lengths).astype(np.int32),
        }
      else:
        inputs = {"source": _append(words, lengths, EOS)}
      yield DecodeBatch(
        inputs, [self.decode(row) for row in answers], answers.shape[1]
      )

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Token accuracy, and accuracy of whole sequences."""
    arguments = (logits, batch["targets"], batch["weights"])
    return {
      "token_accuracy": base.token_accuracy(*arguments),
      "sequence_accuracy": base.sequence_accuracy(*arguments),
    }

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Share of sequences that are reproduced exactly."""
    pairs = list(zip(hypotheses, references, strict=True))
    if not pairs:
      return {}
    return {"exact_match": sum(h == r for h, r in pairs) / len(pairs)}

  def encode(self, line: str) -> list[int]:
    """Ids of symbols separated by spaces, such as "3 17 5"."""
    ids = self._symbol_ids(line)
    words, lengths = np.array([ids], np.int32), np.array([len(ids)])
    if self._kind == "decoder":
      words = self._prompts(words, lengths)
    elif self._kind == "encoder_decoder":
      words = _append(words, lengths, EOS)
    return words[0].tolist()

  def encode_target(self, line: str) -> list[int]:
    """Ids of an answer, written like a source, and EOS."""
    return [*self._symbol_ids(line), EOS]

  def _symbol_ids(self, line: str) -> list[int]:
    symbols = line.split()
    config = self._config
    field, longest = "max_length", config.max_length
    if max(config.eval_lengths, default=0) > longest:
      field, longest = "eval_lengths", max(config.eval_lengths)
    if not 1 <= len(symbols) <= longest:
      raise ValueError(
        f"expected 1 to {longest} symbols (task.{field}), got {len(symbols)}"
      )
    ids = [self._ids.get(symbol, 0) for symbol in symbols]
    for symbol, symbol_id in zip(symbols, ids, strict=True):
      if symbol_id < FIRST_SYMBOL:
        raise ValueError(
          f"expected symbols 0 to {config.vocab_size - 1}, got {symbol!r}"
        )
    return ids

  def _sequences(
    self, split: str, indices: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of a split with these indices: ids [B, L], lengths [B].

    A sequence is held out if its weighted sum of symbols is 0 modulo the number of
    symbols, which holds for one sequence in `vocab_size`. So no sequence is in both
    training and held-out data, even if there are few possible sequences and held-out
    ones repeat. The first symbol is chosen to give the required sum; its distribution
    stays uniform.
    """
    shortest, length = self._config.min_length, self._config.max_length
    if split not in _SPLITS:
      shortest = length = int(split.removeprefix("length_"))
    size = np.uint64(self._config.vocab_size)
    # Philox gives four words per count, and each row starts at its own count. So one
    # random jump suffices for the batch, and a row depends only on its index, not on
    # the batch size.
    counts = -(-(length + 2) // 4)
    first, stop = int(indices.min()), int(indices.max()) + 1
    philox = np.random.Philox(key=self._key(split))
    philox.advance(first * counts)
    raw = philox.random_raw((stop - first) * counts * 4)
    raw = raw.reshape(stop - first, -1)[indices - first]
    span = np.uint64(length - shortest + 1)
    lengths = (raw[:, 0] % span).astype(np.int64) + shortest
    symbols = raw[:, 2 : length + 2] % size
    symbols *= np.arange(length) < lengths[:, None]
    remainder = np.zeros(len(indices), np.uint64)
    if split == "train":
      remainder = np.uint64(1) + raw[:, 1] % (size - np.uint64(1))
    rest = (symbols[:, 1:] * _sum_weights(length)[1:]).sum(axis=1) % size
    symbols[:, 0] = (remainder + size - rest) % size
    ids = symbols.astype(np.int32) + FIRST_SYMBOL
    return np.where(np.arange(length) < lengths[:, None], ids, PAD), lengths

  def _key(self, split: str) -> np.ndarray:
    """The generator's key [2] of a split; no two splits share a number."""
    if split not in _SPLITS:
      return draws.split_key(self._seed, split)
    # The keys of these two splits are numbers, as in earlier versions, so that a seed
    # keeps its sequences.
    sequence = np.random.SeedSequence((self._seed, _SPLITS.index(split)))
    return sequence.generate_state(2, np.uint64)

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    words, lengths = self._sequences(split, indices)
    answers, answer_lengths = self._answers(words, lengths)
    if self._kind == "encoder":
      weights = np.arange(words.shape[1]) < lengths[:, None]
      batch = {"source": words, "targets": answers}
    elif self._kind == "encoder_decoder":
      weights = np.arange(answers.shape[1]) < answer_lengths[:, None]
      batch = {
        "source": _append(words, lengths, EOS),
        "inputs": np.pad(answers[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
        * weights,
        "targets": answers,
      }
    else:
      prompts = self._prompts(words, lengths)
      starts = self._prompt_length(lengths)
      stream = np.pad(prompts, ((0, 0), (0, answers.shape[1])))
      columns = starts[:, None] + np.arange(answers.shape[1])
      np.put_along_axis(stream, columns, answers, axis=1)
      targets = stream[:, 1:]
      positions = np.arange(1, stream.shape[1])
      weights = (positions >= starts[:, None]) & (targets != PAD)
      # Everything after the last weighted target is padding, including EOS.
      batch = {"inputs": stream[:, :-1] * (targets != PAD), "targets": targets}
    return batch | {"weights": weights}

  def _answers(
    self, words: np.ndarray, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """The answers, with EOS if a decoder generates them."""
    if self._config.kind == "reverse":
      columns = lengths[:, None] - 1 - np.arange(words.shape[1])
      reversed_ = np.take_along_axis(words, np.maximum(columns, 0), axis=1)
      words = np.where(columns >= 0, reversed_, PAD).astype(np.int32)
    if self._kind == "encoder":
      return words, lengths
    return _append(words, lengths, EOS), lengths + 1

  def _prompts(self, words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The prompts of a decoder: w SEP, or SEP w SEP."""
    prompts = _append(words, lengths, SEP)
    if self._config.kind == "duplicate":
      prompts = np.pad(prompts, ((0, 0), (1, 0)), constant_values=SEP)
    return prompts

  def _prompt_length(self, length: Any) -> Any:
    return length + (2 if self._config.kind == "duplicate" else 1)

  def _row_length(self, length: int) -> int:
    """T of a batch whose longest w has `length` symbols."""
    if self._kind == "encoder":
      return length
    if self._kind == "encoder_decoder":
      return length + 1
    return self._prompt_length(length) + length


def make(
  config: CopyConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> CopyTask:
  """Creates the task; it reads nothing from disk."""
  del workdir, restore
  return CopyTask(config, kind=kind, batch_size=batch_size, seed=seed)


def _append(words: np.ndarray, lengths: np.ndarray, last: int) -> np.ndarray:
  """[B, L] → [B, L + 1] with one more id after the end of each row."""
  longer = np.pad(words, ((0, 0), (0, 1)))
  np.put_along_axis(longer, lengths[:, None], last, axis=1)
  return longer


def _sum_weights(length: int) -> np.ndarray:
  """Weights of the hash that holds out sequences; small, to avoid overflow."""
  positions = np.arange(length, dtype=np.uint64)
  return positions * positions % np.uint64(65521) + np.uint64(1)
