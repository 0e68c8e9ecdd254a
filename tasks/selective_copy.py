"""Selective copying: reproduce the marked symbols in their order.

    . 3 . . 7 . 3 . | | |        answers 3 7 3 below the marks

The symbols are at random positions among the noise, so a model cannot use a fixed
distance (Jing et al., Gated Orthogonal Recurrent Units, arXiv:1706.02761; Gu and Dao,
Mamba, section 4.1.1, arXiv:2312.00752).
"""

import itertools
from typing import Annotated, ClassVar

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, check
from tasks import draws
from tasks.base import Batch
from tasks.generated import (
  GeneratedTask,
  answered,
  check_eval_lengths,
  maker,
)


@dataclass(frozen=True, config=STRICT)
class SelectiveCopyConfig:
  """The number of symbols to remember, and the amount of noise.

  Attributes:
    vocab_size: number of symbols, with the noise and the mark.
    length: positions of symbols and noise. The marks follow, so T is `length` +
      `num_tokens`.
    num_tokens: number of symbols to remember.
    eval_lengths: other values of `length`, with the same number of symbols; each
      is a split such as 'length_128', after 'test'.
    eval_size: held-out examples per length.
  """

  solved_at: ClassVar[float] = 0.95

  vocab_size: Annotated[int, Ge(4)] = 16
  length: int = 4096
  num_tokens: Count = 16
  eval_lengths: tuple[int, ...] = ()
  eval_size: Count = 1000

  def __post_init__(self):
    check(
      self,
      "length",
      self.length >= self.num_tokens,
      f"at least num_tokens={self.num_tokens}",
    )
    check_eval_lengths(self, self.num_tokens)


class SelectiveCopyTask(GeneratedTask):
  """Symbols among noise, then one mark for each symbol.

  decoder: weights on the marks. All marks are the same input and do not show the
  previous answers, as in the data of S4 and Mamba.
  """

  counts_rows = True

  def __init__(
    self, config: SelectiveCopyConfig, *, batch_size: int, seed: int
  ):
    symbols = map(str, range(1, config.vocab_size - 1))
    super().__init__(
      config,
      itertools.chain(["."], symbols, ["|"]),
      batch_size=batch_size,
      seed=seed,
      length=config.length,
    )

  def _row_length(self, length: int) -> int:
    return length + self._config.num_tokens

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    config, count = self._config, self._config.num_tokens
    length = self._lengths[split] - count
    words = self._words(split, indices, 2 * count)
    tokens = 1 + draws.below(words[:, :count], config.vocab_size - 2)
    positions = np.sort(draws.distinct(words[:, count:], length), axis=1)
    symbols = np.zeros((len(indices), length + count), np.int64)
    symbols[:, length:] = config.vocab_size - 1
    np.put_along_axis(symbols, positions, tokens, axis=1)
    return answered(symbols, length + np.arange(count), tokens)


make = maker("selective_copy", SelectiveCopyTask)
