"""What tasks share whose examples are computed and never stored.

An example is a pure function of (seed, split, index). Answers stand at marked
positions, and only these have a weight, so accuracy under teacher forcing is
what the task asks; nothing is generated to score it.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any

import numpy as np

from settings.checks import check
from tasks import base, draws
from tasks.answers import AnswersInPlace
from tasks.base import BOS, EOS, PAD, Batch

FIRST_SYMBOL = 3
"""Symbols of a task are numbered from here: PAD, BOS and EOS come first."""

_SPECIAL = ("<pad>", "<bos>", "<eos>")


class GeneratedTask(AnswersInPlace, abc.ABC):
  """A task that computes its examples.

  A decoder reads 'inputs' and answers at the weighted positions; targets are
  not its inputs shifted by one.
  """

  source_vocab_size: int | None = None
  target_vocab_size: int
  shared_vocabulary = False
  max_source_length: int | None = None
  max_target_length: int
  pad_id, bos_id, eos_id = PAD, BOS, EOS
  eval_splits: tuple[str, ...]

  def __init__(
    self,
    symbols: Sequence[str],
    lengths: Mapping[str, int],
    *,
    eval_size: int,
    batch_size: int,
    seed: int,
    train_size: int = 0,
  ):
    """Takes what all of these tasks have.

    Args:
      symbols: the label of each id from `FIRST_SYMBOL` on.
      lengths: 'train' and every held-out split → T.
      eval_size: examples of every held-out split.
      batch_size: rows of every batch.
      seed: another seed, other examples.
      train_size: examples that are trained again and again, in an order of its
        own each time; 0 never trains an example twice.
    """
    self._symbols = [*_SPECIAL, *symbols]
    self._ids = {s: FIRST_SYMBOL + i for i, s in enumerate(symbols)}
    self._lengths = dict(lengths)
    self._eval_size = eval_size
    self._batch_size = batch_size
    self._seed = seed
    self._train_size = train_size
    self.target_vocab_size = len(self._symbols)
    self.max_target_length = max(lengths.values())
    self.eval_splits = tuple(split for split in lengths if split != "train")

  @abc.abstractmethod
  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    """The examples of a split with these indices, one a row."""

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The batch of a step: examples step · B … (step + 1) · B − 1."""
    indices = base.indices(step, self._batch_size, rows)
    return _typed(self._examples("train", self._order(indices)))

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """The held-out examples in their order."""
    for start in range(0, self._eval_size, self._batch_size):
      stop = min(start + self._batch_size, self._eval_size)
      batch = _typed(self._examples(split, np.arange(start, stop)))
      yield base.pad_rows(batch, self._batch_size)

  def encode(self, line: str) -> list[int]:
    """Ids of symbols between spaces."""
    return self.encode_target(line)

  def encode_target(self, line: str) -> list[int]:
    """Ids of symbols between spaces; nothing ends them."""
    symbols = line.split()
    if not 1 <= len(symbols) <= self.max_target_length:
      raise ValueError(
        f"expected 1 to {self.max_target_length} symbols, got {len(symbols)}"
      )
    for symbol in symbols:
      if symbol not in self._ids:
        known = list(self._ids)
        raise ValueError(
          f"expected symbols {known[0]} to {known[-1]}, got {symbol!r}"
        )
    return [self._ids[symbol] for symbol in symbols]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Symbols between spaces, up to EOS."""
    return " ".join(self.labels(base.until_eos(ids)))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The symbol of each id."""
    return [self._symbols[int(i)] for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the list of symbols; it follows from the config."""
    content = json.dumps(self._symbols).encode()
    base.save_vocabulary(directory, {"symbols.json": content})

  def _words(self, split: str, indices: np.ndarray, count: int) -> np.ndarray:
    """[B, count] random words of these examples."""
    return draws.words(draws.split_key(self._seed, split), indices, count)

  def _order(self, indices: np.ndarray) -> np.ndarray:
    """Which examples are trained: all of them once, then all of them again."""
    if not self._train_size:
      return indices
    return base.epoch_order(indices, self._train_size, self._seed)


def maker(
  name: str, task_type: Callable[..., GeneratedTask], kind: str = "decoder"
) -> Callable[..., GeneratedTask]:
  """The `make` of a `TaskEntry`, for tasks that need nothing from disk.

  Args:
    name: of the task, for the message.
    task_type: `(config, *, batch_size, seed) -> GeneratedTask`.
    kind: the one layout that it has.
  """
  served = kind

  def make(
    config: Any,
    *,
    kind: str,
    batch_size: int,
    seed: int,
    workdir: pathlib.Path | None = None,
    restore: bool = False,
  ) -> GeneratedTask:
    """Makes the task, or raises ValueError for a kind of model without one."""
    del workdir, restore  # Nothing is stored.
    base.layout(name, kind, (served,))
    return task_type(config, batch_size=batch_size, seed=seed)

  return make


def answers_at(
  shape: tuple[int, ...], columns: np.ndarray, answers: np.ndarray
) -> Batch:
  """'targets' and 'weights' of answers that stand at some columns.

  Args:
    shape: (B, T).
    columns: [B, A] positions, no two of a row alike.
    answers: [B, A] ids.
  """
  targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
  np.put_along_axis(targets, columns, answers.astype(np.int32), axis=1)
  np.put_along_axis(weights, columns, 1, axis=1)
  return {"targets": targets, "weights": weights}


def split_lengths(length: int, others: Sequence[int] = ()) -> dict[str, int]:
  """Trained, validated and tested at one length, held out at others too.

  Returns:
    'train', 'validation', 'test', 'length_512', … → T.
  """
  extra = {f"length_{other}": other for other in others}
  return {"train": length, "validation": length, "test": length, **extra}


def config_lengths(config: Any) -> dict[str, int]:
  """Leaf -> the longest T that it decides, of 'length' and 'eval_lengths'."""
  return {
    "length": config.length,
    "eval_lengths": max(config.eval_lengths, default=0),
  }


def check_eval_lengths(
  config: Any, shortest: int, low: str = "length", high: str = "length"
) -> None:
  """Raises a ValueError unless `config.eval_lengths` are further lengths.

  Args:
    config: of the task.
    shortest: the least length of an example.
    low: leaf of the shortest trained length.
    high: leaf of the longest trained length.
  """
  lengths, first, last = (
    getattr(config, leaf) for leaf in ("eval_lengths", low, high)
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


def _typed(batch: Batch) -> Batch:
  """Ids as int32, weights as float32."""
  return {
    name: array.astype(np.float32 if name == "weights" else np.int32)
    for name, array in batch.items()
  }
