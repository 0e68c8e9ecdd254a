"""ListOps: the value of a nested expression of lists, read as a sequence.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 ] ]        answer 5

Nangia and Bowman, arXiv:1804.06028, with the operators, probabilities and
lengths of Long Range Arena, Tay et al., arXiv:2011.04006.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from annotated_types import Ge, Interval
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Whole, check
from tasks import draws
from tasks.generated import FIRST_SYMBOL, Classified, maker

CLOSE = FIRST_SYMBOL + 1
_FIRST_OPERATOR = FIRST_SYMBOL + 2
_TRIES = 20_000
# Each level is a recursive call; Python allows 1,000.
_MAX_LEVELS = 500


def median(values: Sequence[int]) -> int:
  """The middle value; the mean of two middle values, rounded down."""
  ordered, count = sorted(values), len(values)
  return (ordered[(count - 1) // 2] + ordered[count // 2]) // 2


def sum_modulo(values: Sequence[int]) -> int:
  """The last digit of the sum."""
  return sum(values) % 10


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
  "[MIN": min,
  "[MAX": max,
  "[MED": median,
  "[SM": sum_modulo,
}
"""The operators of Long Range Arena, drawn with equal probability."""

_VALUES = tuple(OPERATORS.values())
_FIRST_DIGIT = _FIRST_OPERATOR + len(OPERATORS)


@dataclass(frozen=True, config=STRICT)
class ListopsConfig:
  """Depth, width and length of the expressions.

  Attributes:
    max_depth: largest number of levels of an expression; a single digit has one.
    max_args: largest number of arguments of an operator; the smallest is 2.
    min_length: smallest number of tokens of an expression, with `]`.
    max_length: largest number of tokens. Only a quarter of all arguments are
      operators; lengths that hardly ever occur raise an error.
    train_size: number of training examples, which are repeated; 0 means that every
      example is new.
    eval_size: number of held-out examples.
  """

  max_depth: Annotated[int, Interval(ge=2, le=_MAX_LEVELS)] = 10
  max_args: Annotated[int, Ge(2)] = 10
  min_length: Count = 500
  max_length: int = 2000
  train_size: Whole = 0
  eval_size: Count = 2000

  def __post_init__(self):
    check(
      self,
      "min_length",
      1 <= self.min_length <= self.max_length,
      f"1 to max_length={self.max_length}",
    )


class ListopsTask(Classified):
  """Expressions, each with one of ten digits as its answer.

  Digits have the same ids as in the source.
  """

  def __init__(self, config: ListopsConfig, *, batch_size: int, seed: int):
    super().__init__(
      config,
      ["]", *OPERATORS, *map(str, range(10))],
      batch_size=batch_size,
      seed=seed,
      length=config.max_length,
    )
    # Raises an error now if no expression has a suitable length.
    self._expression("train", 0)

  def _ids_and_answers(
    self, split: str, indices: np.ndarray
  ) -> Iterator[tuple[list[int], int]]:
    for index in indices.tolist():
      tokens, value = self._expression(split, index)
      yield tokens, _FIRST_DIGIT + value

  def _expression(self, split: str, index: int) -> tuple[list[int], int]:
    """Tokens and value of the first drawn expression with a suitable length."""
    config = self._config
    words = draws.stream(draws.split_key(self._seed, split), index)
    for _ in range(_TRIES):
      tokens: list[int] = []
      value = _append_expression(words, config, config.max_depth, tokens)
      if config.min_length <= len(tokens) <= config.max_length:
        return tokens, value
    raise ValueError(
      f"task.min_length: none of {_TRIES} expressions has {config.min_length} "
      f"to {config.max_length} tokens (task.max_length) with max_depth="
      f"{config.max_depth} and max_args={config.max_args}"
    )


def _append_expression(
  words: Iterator[int], config: ListopsConfig, depth: int, tokens: list[int]
) -> int:
  """Appends an expression of at most `depth` levels, and returns its value.

  An expression that is too long is left incomplete.
  """
  if depth == 1 or next(words) % 4:
    digit = next(words) % 10
    tokens.append(_FIRST_DIGIT + digit)
    return digit
  operator = next(words) % len(_VALUES)
  tokens.append(_FIRST_OPERATOR + operator)
  values = []
  for _ in range(2 + next(words) % (config.max_args - 1)):
    values.append(_append_expression(words, config, depth - 1, tokens))
    if len(tokens) > config.max_length:
      return 0
  tokens.append(CLOSE)
  return _VALUES[operator](values)


make = maker("listops", ListopsTask, "encoder")
