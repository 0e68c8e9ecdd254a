"""ListOps: values by a stack machine, sizes, and the law of the grammar."""

import collections
import statistics

import numpy as np
import pytest

from tasks.listops import ListopsConfig
from tests.tasks.generated_cases import assert_refused, make, rows

SOLVE = {
  "[MIN": min,
  "[MAX": max,
  "[MED": lambda values: int(statistics.median(values)),
  "[SM": lambda values: sum(values) % 10,
}


def solve(symbols):
  """Value, depth and the largest number of arguments of an expression."""
  stack, depth, widest = [[]], 1, 0
  for symbol in symbols:
    if symbol in SOLVE:
      stack.append([symbol])
      depth = max(depth, len(stack))
    elif symbol == "]":
      operator, *values = stack.pop()
      assert len(values) >= 2
      widest = max(widest, len(values))
      stack[-1].append(SOLVE[operator](values))
    else:
      stack[-1].append(int(symbol))
  [[value]] = stack
  return value, depth, widest


def test_the_answer_is_the_value_and_stands_first():
  task = make("listops", max_depth=4, max_args=5)
  deepest, widest, lengths = 0, 0, set()
  for step in range(30):
    for symbols, answers in rows(task, task.train_batch(step)):
      assert symbols[0] == "<cls>"
      expression = [s for s in symbols[1:] if s != "<pad>"]
      assert symbols[1 : len(expression) + 1] == expression
      lengths.add(len(expression))
      value, depth, width = solve(expression)
      assert answers == {0: str(value)}
      deepest, widest = max(deepest, depth), max(widest, width)
  assert (deepest, widest, min(lengths), max(lengths)) == (4, 5, 6, 40)


def test_the_setting_of_long_range_arena():
  task = make("listops", min_length=501, max_length=1999, batch_size=8)
  for symbols, answers in rows(task, task.train_batch(0)):
    expression = [s for s in symbols[1:] if s != "<pad>"]
    assert 501 <= len(expression) <= 1999
    value, depth, width = solve(expression)
    assert depth <= 10
    assert width <= 10
    assert answers == {0: str(value)}


def test_operators_are_a_quarter_and_alike():
  sizes = {"min_length": 1, "max_length": 200, "max_depth": 2}
  task = make("listops", batch_size=3000, **sizes)
  source = task.train_batch(0)["source"]
  counts = collections.Counter(task.labels(source[:, 1]))
  operators = [counts[symbol] / 3000 for symbol in SOLVE]
  np.testing.assert_allclose(operators, 1 / 16, atol=0.02)
  digits = [counts[str(i)] / 3000 for i in range(10)]
  np.testing.assert_allclose(digits, 0.075, atol=0.02)
  # 2 to 10 arguments, each number as often; an expression adds two tokens.
  lengths = (source[:, 1:] > 0).sum(axis=1)
  shares = np.bincount(lengths[lengths > 1], minlength=13)[4:] / 750
  np.testing.assert_allclose(shares, 1 / 9, atol=0.05)


def test_lengths_that_do_not_occur_are_told():
  with pytest.raises(ValueError, match=r"^task\.min_length: none of .* max_a"):
    make("listops", min_length=30, max_length=40, max_depth=2, max_args=3)


def test_config_refuses():
  assert_refused(
    ListopsConfig,
    *({"max_depth": 1}, {"max_args": 1}, {"min_length": 0}),
    *({"min_length": 2001}, {"train_size": -1}, {"eval_size": 0}),
  )
