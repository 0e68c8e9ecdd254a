"""Shared code of tasks whose stored examples have one label each."""

import abc
from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib

import numpy as np

from tasks import base
from tasks.base import Batch, DataError

_FILE = "labels.json"


class LabelledTask(base.Task):
  """Stored examples, each with one of a few labels.

  Attributes:
    names: names of the labels, which a run stores; the index of a label is its id.
  """

  def __init__(
    self,
    names: Sequence[str],
    counts: Mapping[str, int],
    *,
    batch_size: int,
    seed: int,
  ):
    """Creates the task.

    Args:
      names: names of the labels.
      counts: number of examples of 'train' and 'validation'; empty for a restored
        task, which only encodes and decodes.
      batch_size: rows of every batch.
      seed: seed of the training order.
    """
    self.names = list(names)
    self.target_vocab_size = len(self.names)
    self.eval_splits = ("validation",) if counts else ()
    self._counts = counts
    self._batch_size = batch_size
    self._seed = seed

  @abc.abstractmethod
  def _batch(self, split: str, indices: np.ndarray) -> Batch:
    """The examples of a split at some indices."""

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B examples; each epoch has every example once, in a new order."""
    return self._batch("train", self._train_indices(step, rows))

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields every held-out example once, in order."""
    if split not in self.eval_splits:
      raise KeyError(split)
    for indices in base.chunks(self._counts[split], self._batch_size):
      yield base.pad_rows(self._batch(split, indices), self._batch_size)

  def encode_target(self, line: str) -> list[int]:
    """The id of a label."""
    if line not in self.names:
      raise ValueError(
        f"expected a label, one of {', '.join(self.names)}, got {line!r}"
      )
    return [self.names.index(line)]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the labels in the order of their ids."""
    base.save_vocabulary(directory, {_FILE: self._names_content()})

  def check_run(self, workdir: pathlib.Path | None) -> None:
    """Raises DataError if a run started with other labels."""
    base.check_vocabulary(workdir, _FILE, self._names_content())

  def _names_content(self) -> bytes:
    return json.dumps(self.names, ensure_ascii=False, indent=0).encode()

  def _train_indices(self, step: int, rows: np.ndarray | None) -> np.ndarray:
    """Indices of the examples of a step, or of some of its rows."""
    indices = base.indices(step, self._batch_size, rows)
    return base.epoch_order(indices, self._counts["train"], self._seed)


def load_names(workdir: pathlib.Path | None) -> list[str]:
  """Reads the labels of a run, or raises DataError."""
  content = base.load_vocabulary(workdir, _FILE)
  try:
    names = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise DataError(f"{_FILE} of {workdir}: not JSON ({error})") from error
  if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
    raise DataError(f"{_FILE} of {workdir}: expected a list of labels")
  return names
