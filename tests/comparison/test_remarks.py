"""Sentences beside a table: one model of all rows, and doubts of a choice."""

import numpy as np
import pytest

from comparison import records
from comparison.analysis import remarks
from comparison.analysis.task import by_task
from comparison.report import files
from tests.comparison.test_summary import run, runs


def model(found):
  return remarks.row_model(by_task(found)["recall"])


def simulated(spread, names="abcde"):
  """One row far above five equal ones, three seeds, with errors of a spread."""
  generator = np.random.default_rng(0)
  shifts = generator.normal(0, 0.02, 3)
  found = []
  for name in ("dense", *names):
    mean = 0.7 if name in "abcde" else 0.9
    errors = spread * generator.normal(0, 1, 3)
    found += runs(name, (mean + shifts + errors).tolist())
  return found


def test_one_model_is_said_in_one_line_beside_the_pairs():
  assert model(simulated(0.005)) == (
    "In a joint model of row and seed (10 degrees of freedom; a pair has 2; Holm), "
    "all of the 5 other rows differ significantly from the first."
  )
  assert model(simulated(0.005, ["lsh", *"abcde"])).endswith(
    "5 of the 6 other rows differ significantly from the first, but not `dense`."
  )


def test_rows_of_other_seeds_are_said_to_be_left_out():
  found = [*simulated(0.005), *runs("lsh", [0.2, 0.3])]
  assert model(found).endswith(
    "all of the 5 other rows differ significantly from the first (without `lsh`: "
    "other seeds)."
  )


def test_variances_that_differ_are_said():
  found = simulated(0.002)
  found += runs("lsh", [0.2, 0.6, 0.4])
  text = model(found)
  assert "The variances of the rows differ (Bartlett, p = " in text
  assert text.endswith("misleads: rely on ≈.")


@pytest.mark.parametrize(
  "found",
  [
    runs("dense", [0.9, 0.8]) + runs("delta", [0.3, 0.4]),  # Two rows.
    [run(name, 0, 0.5) for name in "abc"],  # One seed.
    [x for name in "abc" for x in runs(name, [1, 0.2], solved_at=0.95)],
    [run(name, n, 0.5) for n, name in enumerate("abcd")],  # None in common.
  ],
)
def test_where_one_model_says_no_more_than_pairs_there_is_none(found):
  assert not model(found)


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
  ]
  (text,) = remarks.doubts(by_task(found)["recall"])
  assert text.startswith("Halving stopped points whose loss was still falling")
  assert text.endswith(
    ": `delta: learning_rate=0.03` and `dense: learning_rate=0.1`"
  )
  for record in found:
    record["solved_at"] = None
  assert not remarks.doubts(by_task(found)["recall"])


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
  (text,) = remarks.doubts(by_task(found)["recall"])
  assert text.endswith("much on chance: `delta: 1 of 4`")


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
  assert "2 of 6 runs done; what follows may change with the others." in head
  assert "Only `dense` has finished" in head
  for n in range(2, 6):
    ending = {"status": "failed", "reason": "x", "final": {}, "history": []}
    records.update(folder, identity(n), **run("dense", n, 0.5) | ending)
  assert "runs done" not in files.write(folder)
