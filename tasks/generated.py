"""Shared code of tasks whose examples are computed, not stored.

An example is a pure function of (seed, split, index). Answers are at marked
positions, and only these have a weight. So the metric is accuracy under teacher
forcing, which needs no generation.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any

import numpy as np

from settings.fields import check
from tasks import base, draws
from tasks.base import Batch

FIRST_SYMBOL = 3
"""Id of a task's first symbol, after PAD, BOS and EOS."""


class GeneratedTask(base.Task):
  """A task that computes its examples.

  A decoder reads 'inputs' and answers at the weighted positions; the targets are
  not the shifted inputs.

  Attributes:
    counts_rows: whether 'sequence_accuracy', the share of rows whose answers are all
      correct, is measured as well.
  """

  counts_rows: bool = False
  _num_before = 0  # Number of ids that `encode` puts before those of a line.

  def __init__(
    self,
    config: Any,
    symbols: Iterable[str],
    *,
    batch_size: int,
    seed: int,
    length: int,
  ):
    """Creates the task.

    The splits are 'train', 'validation', 'test', and for each of
    `config.eval_lengths` one such as 'length_512'. If `config.train_size` is set,
    training repeats this number of examples, in a new order each time.

    Args:
      config: has `eval_size`, the number of examples of every held-out split.
      symbols: the label of each id from `FIRST_SYMBOL` on.
      batch_size: rows of every batch.
      seed: seed of the examples.
      length: length of a training example.
    """
    eval_lengths = getattr(config, "eval_lengths", ())
    self._config = config
    lengths = dict.fromkeys(("train", "validation", "test"), length)
    lengths |= {f"length_{other}": other for other in eval_lengths}
    self._lengths = {s: self._row_length(n) for s, n in lengths.items()}
    self._symbols = ["<pad>", "<bos>", "<eos>", *symbols]
    known = self._symbols[FIRST_SYMBOL:]
    self._ids = {s: FIRST_SYMBOL + i for i, s in enumerate(known)}
    self._batch_size = batch_size
    self._seed = seed
    self._train_size = getattr(config, "train_size", 0)
    self.target_vocab_size = len(self._symbols)
    self.max_target_length = max(self._lengths.values())
    self.eval_splits = tuple(s for s in self._lengths if s != "train")

  def _row_length(self, length: int) -> int:
    """T of an example of a given length."""
    return length

  @abc.abstractmethod
  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    """The examples of a split with these indices, one per row."""

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The batch of a step: examples step · B … (step + 1) · B − 1."""
    indices = base.indices(step, self._batch_size, rows)
    if self._train_size:
      indices = base.epoch_order(indices, self._train_size, self._seed)
    return _cast(self._examples("train", indices))

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields the held-out examples in order."""
    for indices in base.chunks(self._config.eval_size, self._batch_size):
      batch = _cast(self._examples(split, indices))
      yield base.pad_rows(batch, self._batch_size)

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Sums for the share of correct answers, and of rows without an error."""
    sums = super().metric_sums(logits, batch)
    if self.counts_rows:
      sums["sequence_accuracy"] = base.sequence_accuracy(
        logits, batch["targets"], batch["weights"]
      )
    return sums

  def encode(self, line: str) -> list[int]:
    """Ids of symbols separated by spaces."""
    return self.encode_target(line)

  def encode_target(self, line: str) -> list[int]:
    """Ids of symbols separated by spaces, without EOS."""
    symbols = line.split()
    limit = self.max_target_length - self._num_before
    if not 1 <= len(symbols) <= limit:
      raise ValueError(f"expected 1 to {limit} symbols, got {len(symbols)}")
    for symbol in symbols:
      if symbol not in self._ids:
        known = list(self._ids)
        raise ValueError(
          f"expected symbols {known[0]} to {known[-1]}, got {symbol!r}"
        )
    return [self._ids[symbol] for symbol in symbols]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Symbols separated by spaces, up to EOS."""
    return " ".join(self.labels(base.until_eos(ids)))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The symbol of each id."""
    return [self._symbols[int(i)] for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the list of symbols, which depends only on the config."""
    content = json.dumps(self._symbols).encode()
    base.save_vocabulary(directory, {"symbols.json": content})

  def _words(self, split: str, indices: np.ndarray, count: int) -> np.ndarray:
    """Random words of these examples, [B, count]."""
    return draws.words(draws.split_key(self._seed, split), indices, count)


class Classified(GeneratedTask):
  """A generated task that an encoder answers with one symbol.

  encoder: source = `<cls>` example, padded; the target is the answer at the first
  position, the only one with a weight. The first symbol is `<cls>`.
  """

  shared_vocabulary = True
  _num_before = 1

  def __init__(self, config: Any, symbols: Iterable[str], **sizes: Any):
    super().__init__(config, ["<cls>", *symbols], **sizes)
    self.source_vocab_size = self.target_vocab_size
    self.max_source_length = self.max_target_length

  def _row_length(self, length: int) -> int:
    return 1 + length

  @abc.abstractmethod
  def _ids_and_answers(
    self, split: str, indices: np.ndarray
  ) -> Iterator[tuple[Sequence[int] | np.ndarray, int]]:
    """The ids of each example after `<cls>`, and its answer."""

  def encode(self, line: str) -> list[int]:
    """Ids of symbols, after `<cls>`."""
    return [FIRST_SYMBOL, *super().encode(line)]

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    source = np.zeros((len(indices), self._lengths[split]), np.int32)
    source[:, 0] = FIRST_SYMBOL
    answers = np.empty((len(indices), 1), np.int32)
    for row, (ids, answer) in enumerate(self._ids_and_answers(split, indices)):
      source[row, 1 : len(ids) + 1] = ids
      answers[row] = answer
    first = np.zeros_like(answers)
    return {"source": source, **answers_at(source.shape, first, answers)}


def maker(
  name: str, task_type: Callable[..., GeneratedTask], kind: str = "decoder"
) -> Callable[..., GeneratedTask]:
  """Returns the `make` of a `TaskEntry` for tasks that read nothing from disk.

  Args:
    name: name of the task, for the message.
    task_type: `(config, *, batch_size, seed) -> GeneratedTask`.
    kind: the only layout that it supports.
  """
  supported = kind

  def make(
    config: Any,
    *,
    kind: str,
    batch_size: int,
    seed: int,
    workdir: pathlib.Path | None = None,
    restore: bool = False,
  ) -> GeneratedTask:
    """Creates the task, or raises ValueError for an unsupported kind of model."""
    del workdir, restore  # The task stores nothing.
    base.layout(name, kind, (supported,))
    return task_type(config, batch_size=batch_size, seed=seed)

  return make


def answers_at(
  shape: tuple[int, ...], columns: np.ndarray, answers: np.ndarray
) -> Batch:
  """Returns 'targets' and 'weights' with answers at given columns.

  Args:
    shape: (B, T).
    columns: [B, A] positions, distinct within each row.
    answers: [B, A] ids.
  """
  targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  np.put_along_axis(targets, columns, answers.astype(np.int32), axis=1)
  np.put_along_axis(weights, columns, 1, axis=1)
  return {"targets": targets, "weights": weights}


def answered(
  symbols: np.ndarray, columns: np.ndarray, answers: np.ndarray
) -> Batch:
  """Returns a decoder's batch: symbols [B, T] with answers [B, A] at given columns."""
  columns = np.broadcast_to(columns, answers.shape)
  return {
    "inputs": FIRST_SYMBOL + symbols,
    **answers_at(symbols.shape, columns, FIRST_SYMBOL + answers),
  }


def check_eval_lengths(
  config: Any, shortest: int, low: str = "length", high: str = "length"
) -> None:
  """Raises ValueError unless `config.eval_lengths` differ from the trained lengths.

  Args:
    config: config of the task.
    shortest: smallest possible length of an example.
    low: field of the shortest trained length.
    high: field of the longest trained length.
  """
  lengths, first, last = (
    getattr(config, field) for field in ("eval_lengths", low, high)
  )
  trained = f"{high}={last}"
  if low != high:
    trained = f"from {low}={first} to {trained}"
  check(
    config,
    "eval_lengths",
    all(n >= shortest and not first <= n <= last for n in lengths)
    and len(set(lengths)) == len(lengths),
    f"different lengths of at least {shortest}, none of them {trained}",
  )


def _cast(batch: Batch) -> Batch:
  """Ids as int32, weights as float32."""
  return {
    name: array.astype(np.float32 if name == "weights" else np.int32)
    for name, array in batch.items()
  }
