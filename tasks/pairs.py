"""Sentence pairs as ids, and batches of them."""

from collections.abc import Iterable

import numpy as np

from tasks.base import BOS, EOS, PAD, Batch
from tasks.bucketing import Ragged
from tasks.vocabulary import Subwords


class EncodedPairs:
  """One split, encoded once and kept as int32; EOS is in the ids, BOS is not.

  Attributes:
    source: ids of the sources.
    target: ids of the targets.
    lengths: [n, 2] tokens of either side.
    references: the targets as text; empty unless `keep_text`.
  """

  def __init__(
    self,
    chunks: Iterable[tuple[list[str], list[str]]],
    vocabulary: Subwords,
    keep_text: bool,
  ):
    sources, targets = [], []
    self.references: list[str] = []
    for source_text, target_text in chunks:
      # A chunk at a time: lists of Python integers are ten times the size.
      sources.append(Ragged.stack(with_eos(vocabulary.encode(source_text))))
      targets.append(Ragged.stack(with_eos(vocabulary.encode(target_text))))
      if keep_text:
        self.references += target_text
    self.source = Ragged.join(sources)
    self.target = Ragged.join(targets)
    self.lengths = np.stack([self.source.lengths, self.target.lengths], axis=1)

  def batch(self, rows: np.ndarray, shape: tuple[int, int]) -> Batch:
    """Rows in one shape (S, T); what is longer is cut and still ends in EOS."""
    targets = pad_with_eos(self.target, rows, shape[1])
    inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    return {
      "source": pad_with_eos(self.source, rows, shape[0]),
      "inputs": inputs * (targets != PAD),
      "targets": targets,
      "weights": (targets != PAD).astype(np.float32),
    }


def with_eos(rows: list[list[int]]) -> list[list[int]]:
  """Ends every row with EOS."""
  return [[*row, EOS] for row in rows]


def pad_with_eos(ragged: Ragged, rows: np.ndarray, length: int) -> np.ndarray:
  """Rows as [len(rows), length]; one that is cut ends with EOS all the same."""
  padded = ragged.pad(rows, length)
  padded[ragged.lengths[rows] > length, -1] = EOS
  return padded
