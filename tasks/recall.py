"""Multi-query associative recall: which value came with this key?

    k3 v9 k7 v2 . . k7 . k3 . . .        answers v2 below k7, v9 below k3

Arora et al., Zoology: Measuring and Improving Recall in Efficient Language
Models, section 3 and appendix, arXiv:2312.04927.
"""

import itertools
from typing import Annotated, ClassVar

from annotated_types import Interval
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Whole, check
from tasks import draws
from tasks.base import Batch
from tasks.generated import (
  GeneratedTask,
  answered,
  check_eval_lengths,
  maker,
)


@dataclass(frozen=True, config=STRICT)
class RecallConfig:
  """The number of pairs and the length of the sequence.

  Attributes:
    vocab_size: V symbols: one filler, V/2 − 1 keys, and values.
    length: T, of which the first 2 · `num_pairs` are keys and their values.
    eval_lengths: other T with the same number of pairs; each is a split such as
      'length_512', after 'test'.
    num_pairs: number of keys, each queried once. At most T/4, because each pair
      takes two positions and its query two more.
    fewer_pairs: other numbers of pairs. The number of an example is one of these or
      `num_pairs`, with equal probability. For each number there is a split such as
      'pairs_4', after the other splits, the largest last.
    power: exponent a of the distribution of gaps: a query comes g slots of two
      positions after the pairs with probability proportional to (g + 1)^(a − 1); 1 is
      uniform.
    random_filler: fills the other positions with random symbols instead of the
      filler.
    train_size: number of training examples, which are repeated; 0 means that every
      example is new.
    eval_size: number of held-out examples.
  """

  solved_at: ClassVar[float] = 0.95

  vocab_size: int = 8192
  length: int = 64
  eval_lengths: tuple[int, ...] = ()
  num_pairs: Count = 4
  fewer_pairs: tuple[Count, ...] = ()
  power: Annotated[float, Interval(gt=0, le=1)] = 0.01
  random_filler: bool = False
  train_size: Whole = 0
  eval_size: Count = 3000

  def __post_init__(self):
    check(
      self,
      "vocab_size",
      self.vocab_size >= 2 * self.num_pairs + 2,
      f"at least {2 * self.num_pairs + 2}, for num_pairs={self.num_pairs} keys",
    )
    check(
      self,
      "length",
      self.length >= 4 * self.num_pairs,
      f"at least 4 · num_pairs = {4 * self.num_pairs}",
    )
    check_eval_lengths(self, 4 * self.num_pairs)
    check(
      self,
      "fewer_pairs",
      list(self.numbers) == sorted(set(self.numbers)),
      f"increasing numbers below num_pairs={self.num_pairs}",
    )

  @property
  def numbers(self) -> tuple[int, ...]:
    """The numbers of pairs in the examples, the largest last."""
    return *self.fewer_pairs, self.num_pairs


class RecallTask(GeneratedTask):
  """Pairs, then queries; the answer is due where a key appears again.

  decoder: inputs = pairs, then keys among filler; weights on these keys.
  """

  counts_rows = True

  def __init__(self, config: RecallConfig, *, batch_size: int, seed: int):
    half = config.vocab_size // 2
    keys = (f"k{i}" for i in range(1, half))
    values = (f"v{i}" for i in range(half, config.vocab_size))
    super().__init__(
      config,
      itertools.chain(["."], keys, values),
      batch_size=batch_size,
      seed=seed,
      length=config.length,
    )
    self._numbers = dict.fromkeys(self._lengths, config.numbers)
    if config.fewer_pairs:
      self._numbers |= {f"pairs_{n}": (n,) for n in config.numbers}
    for split in self._numbers:
      self._lengths.setdefault(split, config.length)
    self.eval_splits = tuple(x for x in self._lengths if x != "train")

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    numbers = self._numbers[split]
    if len(numbers) == 1:
      return self._examples_with_pairs(split, indices, numbers[0])
    draw = draws.words(
      draws.split_key(self._seed, f"{split} numbers"), indices, 1
    )
    choices = draws.below(draw[:, 0], len(numbers))
    shape = len(indices), self._lengths[split]
    batch = {
      "inputs": np.zeros(shape, np.int64),
      "targets": np.zeros(shape, np.int32),
      "weights": np.zeros(shape, np.float32),
    }
    for choice, pairs in enumerate(numbers):
      mask = choices == choice
      for name, rows in self._examples_with_pairs(
        split, indices[mask], pairs
      ).items():
        batch[name][mask] = rows
    return batch

  def _examples_with_pairs(
    self, split: str, indices: np.ndarray, pairs: int
  ) -> Batch:
    config, length = self._config, self._lengths[split]
    context = 2 * pairs
    slots = (length - context) // 2
    fill = length if config.random_filler else 0
    words = self._words(split, indices, context + slots + fill)
    half = config.vocab_size // 2
    keys = 1 + draws.distinct(words[:, :pairs], half - 1)
    values = half + draws.distinct(
      words[:, pairs:context], config.vocab_size - half
    )
    weights = np.arange(1.0, slots + 1) ** (config.power - 1)
    gaps = draws.distinct_weighted(
      words[:, context : context + slots], weights, pairs
    )
    columns = context + 2 * gaps
    symbols = np.zeros((len(indices), length), np.int64)
    if fill:
      symbols = draws.below(words[:, context + slots :], config.vocab_size)
    symbols[:, 0:context:2], symbols[:, 1:context:2] = keys, values
    np.put_along_axis(symbols, columns, keys, axis=1)
    return answered(symbols, columns, values)


make = maker("recall", RecallTask)
