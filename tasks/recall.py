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
from tasks.generated import GeneratedTask, answered, check_eval_lengths, maker


@dataclass(frozen=True, config=STRICT)
class RecallConfig:
  """How many pairs, in which sequence.

  Attributes:
    vocab_size: V symbols: one filler, V/2 − 1 keys, and values.
    length: T, of which the first 2 · `num_pairs` are keys and their values.
    eval_lengths: other T with as many pairs; each is a split such as 'length_512',
      after 'test'.
    num_pairs: keys, each asked for once. At most T/4, as each needs two places
      for itself and two for its question.
    power: a in the law of gaps: a question stands g places of two after the
      pairs with probability in proportion to (g + 1)^(a − 1), so 1 is uniform.
    random_filler: other places hold any symbol, instead of the filler.
    train_size: examples that are trained repeatedly; 0 makes ever new ones.
    eval_size: held-out examples.
  """

  solved_at: ClassVar[float] = 0.95

  vocab_size: int = 8192
  length: int = 64
  eval_lengths: tuple[int, ...] = ()
  num_pairs: Count = 4
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


class RecallTask(GeneratedTask):
  """Pairs, then questions; the answer is expected where the key is read again.

  decoder: inputs = pairs, then keys among filler; weights on the keys there.
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

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    config, length = self._config, self._lengths[split]
    pairs, context = config.num_pairs, 2 * config.num_pairs
    places = (length - context) // 2
    fill = length if config.random_filler else 0
    words = self._words(split, indices, context + places + fill)
    half = config.vocab_size // 2
    keys = 1 + draws.distinct(words[:, :pairs], half - 1)
    values = half + draws.distinct(
      words[:, pairs:context], config.vocab_size - half
    )
    law = np.arange(1.0, places + 1) ** (config.power - 1)
    gaps = draws.distinct_weighted(
      words[:, context : context + places], law, pairs
    )
    columns = context + 2 * gaps
    symbols = np.zeros((len(indices), length), np.int64)
    if fill:
      symbols = draws.below(words[:, context + places :], config.vocab_size)
    symbols[:, 0:context:2], symbols[:, 1:context:2] = keys, values
    np.put_along_axis(symbols, columns, keys, axis=1)
    return answered(symbols, columns, values)


make = maker("recall", RecallTask)
