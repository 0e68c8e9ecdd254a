"""Induction heads: which symbol followed the earlier special symbol?

    4 0 => 9 2 2 7 1 =>        answer 9, below the last =>

Olsson et al., In-context Learning and Induction Heads, arXiv:2209.11895, as set
by Fu et al. (H3, arXiv:2212.14052) and Gu and Dao (Mamba, arXiv:2312.00752).
"""

import itertools
from typing import Annotated, ClassVar

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count
from tasks import draws
from tasks.base import Batch
from tasks.generated import (
  GeneratedTask,
  answered,
  check_eval_lengths,
  maker,
)

_SHORTEST = 4


@dataclass(frozen=True, config=STRICT)
class InductionConfig:
  """The trained length, and other lengths for evaluation.

  Attributes:
    vocab_size: number of symbols, with the special one.
    length: T in training; the last token is the special symbol.
    eval_lengths: other T; each is a split such as 'length_512', after 'test'.
    eval_size: held-out examples per length.
  """

  solved_at: ClassVar[float] = 0.95

  vocab_size: Annotated[int, Ge(3)] = 16
  length: Annotated[int, Ge(_SHORTEST)] = 256
  eval_lengths: tuple[int, ...] = ()
  eval_size: Count = 1000

  def __post_init__(self):
    check_eval_lengths(self, _SHORTEST)


class InductionTask(GeneratedTask):
  """Random symbols, with the special symbol at one random position and at the end.

  decoder: weight on the last position, which has the answer. As in H3's code, the
  random position is not one of the last two before the end.
  """

  def __init__(self, config: InductionConfig, *, batch_size: int, seed: int):
    super().__init__(
      config,
      itertools.chain(map(str, range(config.vocab_size - 1)), ["=>"]),
      batch_size=batch_size,
      seed=seed,
      length=config.length,
    )

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    special, length = self._config.vocab_size - 1, self._lengths[split]
    words = self._words(split, indices, length)
    symbols = draws.below(words, special)
    positions = draws.below(words[:, -1:], length - 3)
    answers = np.take_along_axis(symbols, positions + 1, axis=1)
    np.put_along_axis(symbols, positions, special, axis=1)
    symbols[:, -1] = special
    return answered(symbols, np.full_like(positions, length - 1), answers)


make = maker("induction", InductionTask)
