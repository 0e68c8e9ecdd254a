"""Sentences beside a table: how rows were compared, and doubts of a choice."""

import math

import pytest

from comparison import records
from comparison.analysis import remarks
from comparison.analysis.task import by_task
from comparison.report import files
from tests.comparison.test_summary import run, runs


def test_the_page_says_how_rows_were_compared():
  found = runs("dense", [0.9, 0.8, 0.91]) + runs("delta", [0.3, 0.41, 0.5])
  found += runs("lsh", [0.2, 0.3, 0.2])
  assert remarks.tests(by_task(found)["recall"]) == (
    "Tests: against `dense`, the first row; Tukey's test of all pairs of rows, "
    "paired by seed, 4 degrees of freedom."
  )
  declared = by_task(found, reference="delta")["recall"]
  assert remarks.tests(declared) == (
    "Tests: against `delta`, declared beforehand; Student's t-test paired by seed, "
    "Holm's correction over the other rows."
  )
  for record in found:
    record["solved_at"] = 0.95
  assert remarks.tests(by_task(found)["recall"]).endswith(
    "permutation test within seeds of the largest difference between any two rows "
    "in the share of solved seeds or the mean up to 0.95."
  )
  assert remarks.tests(by_task(found, reference="path")["recall"]) == (
    "Tests: none yet, because `path` has no complete row."
  )
  assert not remarks.tests(by_task(found[:3])["recall"])
  seeds = [("dense", 10), ("delta", 3), ("delta", 4)]
  plan = {
    str(n): {"row": f"recall, {row}", "seed": seed, "added": True}
    for n, (row, seed) in enumerate(seeds)
  }
  told = remarks.tests(by_task(found, plan)["recall"])
  assert "Seeds 3, 4, 10 were added to those planned at first" in told


def stopped(attention, losses, split="validation", rate=0.03):
  history = [
    {"step": 100 * n, "split": split, "loss": loss}
    for n, loss in enumerate(losses, 1)
  ]
  if split == "train":
    history.append({"step": 400, "split": "validation", "loss": losses[-1]})
  return run(
    attention, 10_000, 0.0, rate=rate, choosing=True, status=records.STOPPED_EARLY,
    final={}, history=history,
  )  # fmt: skip


def test_points_that_were_stopped_while_they_learned_are_named():
  found = runs("dense", [1.0, 0.2], solved_at=0.95)
  found += runs("delta", [0.1, 0.2], solved_at=0.95)
  found += runs("lsh", [0.1, 0.2], solved_at=0.95)
  found += runs("path", [1.0, 1.0], solved_at=0.95)
  found += [
    stopped("path", [3.4, 3.3, 3.0, 2.5]),  # Nothing is lost by it.
    stopped("delta", [3.4, 3.3, 3.0, 2.5]),
    stopped("dense", [3.4, 3.3, 3.0, 2.5], "train", rate=0.1),
    stopped("lsh", [3.4, 3.4, 3.4, 3.39]),  # It had stopped by itself.
    stopped("lsh", [-3.4, -3.4, -3.4, -3.4]),
  ]
  (text,) = remarks.choice_warnings(by_task(found)["recall"])
  assert text.startswith("Halving stopped points whose loss was still falling")
  assert text.endswith(
    ": `delta: learning_rate=0.03` and `dense: learning_rate=0.1`"
  )
  for record in found:
    record["solved_at"] = None
  assert not remarks.choice_warnings(by_task(found)["recall"])


def lines(split, losses, first=100):
  steps = range(first, first + 100 * len(losses), 100)
  pairs = zip(steps, losses, strict=True)
  return [{"step": step, "split": split, "loss": loss} for step, loss in pairs]


@pytest.mark.parametrize(
  ("held_out", "train", "falls"),
  [
    # By 1.7 and by 2.3 % since three quarters of the steps.
    ([3.4, 3.3, 3.0, 2.95], [], False),
    ([3.4, 3.3, 3.0, 2.93], [], True),
    ([-3.4, -3.4, -3.4, -3.45], [], False),
    ([-3.4, -3.4, -3.4, -3.5], [], True),
    ([*[3.4] * 6, 2.9, 2.9, 2.9], [], True),  # Since step 600 of 900, not 700.
    ([3.4, 3.3, 3.0, math.nan], [], True),  # Of the three before.
    # Of three evaluations the split for choices counts, of two the training loss.
    ([3.0, 3.0, 3.0], [3.0, 2.0, 1.0], False),
    ([3.0, 3.0], [3.0, 2.0, 1.0], True),
    ([3.0, 2.0], [3.0, 3.0, 3.0], False),
    ([3.0], [], False),
  ],
)
def test_when_a_loss_is_falling(held_out, train, falls):
  history = [*lines("validation", held_out), *lines("train", train)]
  assert remarks._was_falling({"history": history}) == falls


def test_choosing_seeds_that_disagree_are_counted():
  found = []
  for name, solved in (("dense", 4), ("delta", 1), ("lsh", 0)):
    found += runs(name, [1.0, 1.0], solved_at=0.95)
    found += [
      run(name, 10_000 + n, float(n < solved), choosing=True, solved_at=0.95)
      for n in range(4)
    ]
  # Not at the chosen point.
  found.append(
    run("dense", 10_000, 0.0, rate=0.1, choosing=True, solved_at=0.95)
  )
  (text,) = remarks.choice_warnings(by_task(found)["recall"])
  assert text.endswith("strongly on chance: `delta: 1 of 4`")


def test_a_report_says_how_many_runs_there_are_while_some_are_missing(folder):
  identity = "recall-dense-{}".format
  (folder / records.RECORDS).mkdir()
  for n, record in enumerate(runs("dense", [0.9, 0.8])):
    records.update(folder, identity(n), **record)
  entries = {
    identity(n): {"task": "recall", "row": "recall, dense", "seed": n}
    for n in range(6)
  }
  records.atomic.write_json(folder / records.PLAN, entries)
  text = files.write(folder)
  head = text[: text.index("## How to read this")]
  assert "2 of 6 runs done; the results below may change." in head
  assert "So far: Only `dense` has finished" in head
  for n in range(2, 6):
    ending = {"status": "failed", "reason": "x", "final": {}, "history": []}
    records.update(folder, identity(n), **run("dense", n, 0.5) | ending)
  assert "runs done" not in files.write(folder)
