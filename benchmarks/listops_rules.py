"""What rules see of a ListOps expression that read little of it.

Nothing; the operator at the root; that operator and its value on those of its
arguments that are digits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tasks import listops
from tasks.base import Batch, Task


class Seen(NamedTuple):
  """What rules may see of an expression.

  Attributes:
    root: the operator at the root; empty where the expression is a digit.
    shallow: its value on those of its arguments that are digits; None without any.
  """

  root: str
  shallow: int | None


RULES: dict[str, Callable[[Seen], object]] = {
  "nothing": lambda seen: None,
  "the operator at the root": lambda seen: seen.root,
  "that operator on its digits": lambda seen: seen,
}
"""Name -> what the rule sees."""


def seen(symbols: Sequence[str]) -> Seen:
  """What there is at the root of an expression, as `[MAX 4 [MIN 2 3 ] 1 ]`."""
  root = symbols[0]
  if root not in listops.OPERATORS:
    return Seen("", int(root))
  depth, digits = 0, []
  for symbol in symbols:
    if symbol in listops.OPERATORS:
      depth += 1
    elif symbol == "]":
      depth -= 1
    elif depth == 1:
      digits.append(int(symbol))
  return Seen(root, listops.OPERATORS[root](digits) if digits else None)


def examples(task: Task, batch: Batch) -> Iterator[tuple[Seen, int]]:
  """Expressions and their answers."""
  for source, targets in zip(batch["source"], batch["targets"], strict=True):
    symbols = task.labels(source[1 : np.count_nonzero(source)])
    yield seen(symbols), int(task.labels(targets[:1])[0])
