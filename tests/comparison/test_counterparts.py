"""Equal parameters: counterparts beside narrow rows."""

import pytest

from comparison import plan, records
from comparison import run as run_lib
from comparison.planned_run import DENSE, MATCHED
from tests.comparison.plans import comparison

NARROW = {"tasks": "recall", "attention": "dense,additive,linear"}


def compared(**changes):
  sizes = {"model.mlp_features": 32}
  return comparison(**{**NARROW, **sizes, **changes})


def test_a_row_that_has_to_be_narrow_has_a_counterpart_as_wide_as_dense():
  runs = plan.plan(compared(seeds="0,1"))
  names = [(run.attention, run.width == DENSE) for run in runs[:4]]
  additive = [("additive", False), ("additive", True)]
  assert names == [("dense", False), *additive, ("linear", False)]
  dense, narrow, wide, _ = runs[:4]
  assert narrow.dense_feed_forward == wide.dense_feed_forward == 32
  assert wide.feed_forward == 32 > 2 * narrow.feed_forward
  assert wide.parameters == wide.unmatched_parameters > dense.parameters
  assert {run.dense_parameters for run in runs} == {dense.parameters}
  assert len({run.identity for run in runs}) == len(runs) == 8
  assert plan.counterpart_lines(runs) == [
    f"recall, additive: feed-forward {narrow.feed_forward} of 32 to have "
    f"{narrow.parameters:,} parameters; its counterpart has 32"
  ]


def test_other_rows_and_unequal_comparisons_have_none():
  assert not plan.counterpart_lines(
    plan.plan(compared(**{"model.mlp_features": 512}))
  )
  runs = plan.plan(compared(match_parameters=False))
  assert not plan.counterpart_lines(runs)
  assert len(runs) == 3
  assert {run.feed_forward for run in runs} == {None}


@pytest.mark.parametrize(
  ("needs", "changes"),
  [
    # Less than half of the width, or more than 2 % off.
    (False, {"feed_forward": 50}),
    (True, {"feed_forward": 49}),
    (False, {"parameters": 1020}),
    (True, {"parameters": 1021}),
    (True, {"parameters": 979}),
    # As it was, of the width of dense attention, or of no width.
    (False, {"feed_forward": 100, "parameters": 2000}),
    (False, {"feed_forward": 49, "width": plan.DENSE}),
    *((False, {"parameters": 2000, "feed_forward": x}) for x in (None,)),
    *(
      (False, {"parameters": 2000, "dense_feed_forward": x}) for x in (None, 0)
    ),
    (False, {"parameters": 2000, "dense_parameters": None}),
  ],
)
def test_what_needs_a_counterpart(needs, changes):
  sizes = {"parameters": 1000, "dense_parameters": 1000}
  sizes |= {"feed_forward": 60, "dense_feed_forward": 100, **changes}
  run = plan.Run("recall", "a", "delta", 0, {}, {}, **sizes)
  assert plan._needs_counterpart(run) == needs


def test_a_counterpart_chooses_for_itself(folder, trainer, capsys):
  rate = "optimizer.learning_rate"
  best = {MATCHED: 1e-3, DENSE: 1e-2}
  trainer.loss = lambda run, step: abs(run.fields[rate] - best[run.width])
  one = compared(
    attention="additive",
    grid={"optimizer": {"learning_rate": "1e-3,3e-3,1e-2"}},
    halving={"seeds": 1},
    seeds="0",
  )
  run_lib.run(one, folder)
  rates = {
    record["width"]: record["grid"][rate]
    for record in records.read(folder)[0]
    if not record["choosing"]
  }
  assert rates == best
  # It is said before anything runs.
  assert "its counterpart has 32" in capsys.readouterr().out.splitlines()[0]
