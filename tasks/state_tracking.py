"""State tracking: the product of all permutations up to each position.

    213 132 213        answers 213, 312, 321: each prefix applied to 123

This is the word problem of the symmetric group S_n. For n = 5 it is complete for NC¹,
so no fixed number of layers of attention or of a diagonal recurrence solves it at every
length; for n = 3, two counters suffice.

Merrill, Petty and Sabharwal, The illusion of state in state-space models,
arXiv:2404.08819.
"""

from collections.abc import Mapping
import itertools
from typing import Annotated, Any, ClassVar

from annotated_types import Interval
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count
from tasks import base, draws
from tasks.base import Batch
from tasks.generated import (
  GeneratedTask,
  answered,
  check_eval_lengths,
  maker,
)

_MAX_LETTERS = 5
"""Largest number of letters; 6 would need 720 symbols, one for each permutation."""


@dataclass(frozen=True, config=STRICT)
class StateTrackingConfig:
  """The group, the trained length, and other lengths for evaluation.

  Attributes:
    letters: n of S_n, 2 to 5.
    length: T in training.
    eval_lengths: other T; each is a split such as 'length_256', after 'test'.
    eval_size: held-out examples per length.
  """

  solved_at: ClassVar[float] = 0.95
  answers_prefixes: ClassVar[bool] = True

  letters: Annotated[int, Interval(ge=2, le=_MAX_LETTERS)] = 3
  length: Count = 32
  eval_lengths: tuple[int, ...] = ()
  eval_size: Count = 1000

  def __post_init__(self):
    check_eval_lengths(self, 1)


class StateTrackingTask(GeneratedTask):
  """Random permutations; the answer at each position is their product so far.

  decoder: inputs = permutations, weights on every position. Every prefix has an
  answer, so 'accuracy' is a mean over prefixes; 'last_accuracy' is the accuracy for
  the whole sequence.
  """

  counts_rows = True

  def __init__(
    self, config: StateTrackingConfig, *, batch_size: int, seed: int
  ):
    elements = list(itertools.permutations(range(config.letters)))
    super().__init__(
      config,
      ("".join(str(1 + i) for i in element) for element in elements),
      batch_size=batch_size,
      seed=seed,
      length=config.length,
    )
    number = {element: i for i, element in enumerate(elements)}
    # Entry [p, x] is the product of p and then x, whose letter i is x[p[i]].
    self._products = np.array(
      [[number[tuple(x[i] for i in p)] for x in elements] for p in elements]
    )

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    words = self._words(split, indices, self._lengths[split])
    permutations = draws.below(words, len(self._products))
    products = np.empty_like(permutations)
    # Permutation 0 is the identity.
    product = np.zeros_like(permutations[:, 0])
    for t in range(permutations.shape[1]):
      product = self._products[product, permutations[:, t]]
      products[:, t] = product
    return answered(permutations, np.arange(permutations.shape[1]), products)

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Accuracy over all prefixes, whole rows, and last positions.

    For two letters and 256 positions, a model that is perfect up to position 32 and
    guesses afterwards has 56 % of the prefixes and 50 % of the last positions right.
    """
    last = base.last_accuracy(logits, batch["targets"], batch["weights"])
    return {**super().metric_sums(logits, batch), "last_accuracy": last}


make = maker("state_tracking", StateTrackingTask)
