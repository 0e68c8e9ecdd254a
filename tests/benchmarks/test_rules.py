"""Rules that read little of an example of ListOps."""

import pytest

from benchmarks.rules import LISTOPS_RULES, Seen, accuracies, listops_seen
from tests import commands


@pytest.mark.parametrize(
  ("expression", "expected"),
  [
    ("7", Seen("", 7)),
    ("[MAX 4 3 [MIN 2 9 ] 1 ]", Seen("[MAX", 4)),
    ("[SM 9 [SM 5 5 ] 8 ]", Seen("[SM", 7)),
    ("[MED [MIN 1 2 ] [MAX 1 [SM 2 2 ] ] ]", Seen("[MED", None)),
  ],
)
def test_only_the_root_and_its_digits_are_seen(expression, expected):
  assert listops_seen(expression.split()) == expected


def test_rules_give_the_most_frequent_answer_after_what_they_see():
  low, high = Seen("[MIN", 1), Seen("[MAX", 8)
  counted = [(low, 1), (low, 1), (low, 0), (high, 8), (high, 9), (high, 8)]
  counted += [(Seen("[MAX", 9), 9)] * 3
  tried = [(low, 1), (high, 8), (Seen("[MAX", 9), 9), (Seen("[SM", 3), 9)]
  # 9 is the most frequent of all and after [MAX; [SM was never counted.
  assert accuracies(LISTOPS_RULES, counted, tried) == {
    "nothing": 0.5,
    "the operator at the root": 0.5,
    "that operator on its digits": 0.75,
  }


def run(*arguments):
  return commands.run_module("benchmarks.rules", *arguments)


def test_the_command():
  code, out, error = run("--config=configs/listops.py", "--examples=400")
  assert (code, error) == (0, "")
  config, *lines = out.splitlines()
  of = [float(line.split()[-1].rstrip("%")) for line in lines]
  assert config.startswith("configs/listops.py: max_depth=4, ")
  assert 5 < of[0] < of[1] < of[2] < 90
  code, _, error = run("--config=configs/copy.py")
  assert code == 2
  assert "has the task 'copy'; expected listops or pathf" in error
