"""Needle in a haystack: the value of one key, at several depths and lengths.

    f3 f1 k4 v2 f1 f1 f0 f5 k1 v7 ? k4        answer v2, below the last k4

Kamradt's test of long contexts (2023), with the distracting pairs of RULER's
multi-key setting, Hsieh et al., arXiv:2404.06654, and symbols instead of words.
"""

from collections.abc import Mapping
import itertools
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Interval
import jax.numpy as jnp
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Whole, check
from tasks import base, draws
from tasks.base import Batch
from tasks.generated import (
  GeneratedTask,
  answered,
  check_eval_lengths,
  maker,
)


@dataclass(frozen=True, config=STRICT)
class NeedleConfig:
  """Length, number of distractors, and lengths and depths of evaluation.

  Attributes:
    length: T in training, for pairs among filler, then `?` and the key.
    eval_lengths: other T; each is a split such as 'length_512', after 'test'.
    num_depths: number of depths that are evaluated in turn, evenly spaced from the
      first position of the haystack to the last. In training every position is
      equally likely.
    num_distractors: number of pairs with other keys, at random positions.
    num_keys: number of different keys.
    num_values: number of different values.
    num_fillers: number of different filler symbols.
    eval_size: held-out examples per length.
  """

  solved_at: ClassVar[float] = 0.95

  length: int = 256
  eval_lengths: tuple[int, ...] = ()
  num_depths: Annotated[int, Interval(ge=2, le=101)] = 5
  num_distractors: Whole = 3
  num_keys: int = 32
  num_values: Annotated[int, Ge(2)] = 32
  num_fillers: Count = 32
  eval_size: int = 1000

  def __post_init__(self):
    check(
      self,
      "num_keys",
      self.num_keys > self.num_distractors,
      f"more than num_distractors={self.num_distractors}",
    )
    shortest = 2 + 2 * max(self.num_depths, self.num_distractors + 1)
    check(
      self,
      "length",
      self.length >= shortest,
      f"at least {shortest}, for num_depths={self.num_depths} and "
      f"num_distractors={self.num_distractors}",
    )
    check_eval_lengths(self, shortest)
    check(
      self,
      "eval_size",
      self.eval_size >= self.num_depths,
      f"at least num_depths={self.num_depths}",
    )


class NeedleTask(GeneratedTask):
  """Pairs among filler, and a question about one of them at the end.

  decoder: weight on the last position, where the key appears again.

  The haystack is a sequence of slots of two tokens; at depth d in [0, 1] the needle
  is in the slot nearest to d · (slots − 1).
  """

  def __init__(self, config: NeedleConfig, *, batch_size: int, seed: int):
    counts = {
      "k": config.num_keys,
      "v": config.num_values,
      "f": config.num_fillers,
    }
    symbols = (
      f"{kind}{i}" for kind, count in counts.items() for i in range(count)
    )
    super().__init__(
      config,
      itertools.chain(symbols, "?"),
      batch_size=batch_size,
      seed=seed,
      length=config.length,
    )

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Accuracy overall and at each depth, 'accuracy_depth_25' at a quarter."""
    inputs, targets, weights = (
      batch[name] for name in ("inputs", "targets", "weights")
    )
    # The needle is at the first occurrence of the key.
    needles = jnp.argmax(inputs == inputs[:, -1:], axis=1) // 2
    last = self._config.num_depths - 1
    depths = jnp.round(needles * last / (_num_slots(inputs.shape[1]) - 1))
    sums = super().metric_sums(logits, batch)
    for depth in range(last + 1):
      depth_weights = weights * (depths == depth)[:, None]
      name = f"accuracy_depth_{round(100 * depth / last)}"
      sums[name] = base.token_accuracy(logits, targets, depth_weights)
    return sums

  def _examples(self, split: str, indices: np.ndarray) -> Batch:
    config, length = self._config, self._lengths[split]
    slots, pairs = _num_slots(length), config.num_distractors + 1
    words = self._words(split, indices, length + 3 * pairs)
    slot_words, key_words, value_words, filler = np.split(
      words, np.arange(1, 4) * pairs, axis=1
    )
    needles = draws.below(slot_words[:, :1], slots)
    if split != "train":
      last = config.num_depths - 1
      depths = indices[:, None] % config.num_depths / last
      needles = np.rint(depths * (slots - 1)).astype(np.int64)
    others = draws.distinct(slot_words[:, 1:], slots - 1)
    others += others >= needles
    columns = 2 * np.concatenate([needles, others], axis=1)
    keys = draws.distinct(key_words, config.num_keys)
    values = config.num_keys + draws.below(value_words, config.num_values)
    first_filler = config.num_keys + config.num_values
    symbols = first_filler + draws.below(filler, config.num_fillers)
    np.put_along_axis(symbols, columns, keys, axis=1)
    np.put_along_axis(symbols, columns + 1, values, axis=1)
    symbols[:, -2] = first_filler + config.num_fillers
    symbols[:, -1] = keys[:, 0]
    return answered(symbols, np.full_like(needles, length - 1), values[:, :1])


def _num_slots(length: int) -> int:
  """Returns the number of slots of two tokens before the question."""
  return (length - 2) // 2


make = maker("needle", NeedleTask)
