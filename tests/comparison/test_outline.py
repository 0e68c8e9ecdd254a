"""What a comparison says before it trains anything, and its fields in --help."""

import dataclasses

import pytest

from comparison import outline, records
from comparison.config import parse
from comparison.planned_run import DENSE, Run
from configs.compare import recall
from settings.errors import RunError
from tests.comparison.plans import comparison

RUN = Run("copy", "dense", "dense", 0, {"num_steps": 60}, {}, steps=60)


def rows(*attentions, across=()):
  """A run of seeds 0 and 1 for each mechanism and point."""
  return [
    dataclasses.replace(
      RUN, attention=name, mechanism=name, across=point
    ).with_seed(seed)
    for seed in (0, 1)
    for point in across or [{}]
    for name in attentions
  ]


def test_rows_are_a_product_with_their_runs():
  across = {"model": {"short_convolution": (False, True)}}
  points = [{"model.short_convolution": x} for x in (False, True)]
  two = comparison(attention="dense,delta", seeds="0,1", across=across)
  runs = rows("dense", "delta", across=points)
  assert outline.line(runs, two) == (
    "4 rows = 2 mechanisms × short_convolution False, True; 8 runs"
  )
  for place in (3, 7):
    runs[place] = dataclasses.replace(runs[place], obstacle="no")
  told = "True, of which 1 cannot run; 6 runs"
  assert outline.line(runs, two).endswith(told)


def test_counterparts_and_a_grid_are_counted():
  alone = comparison(attention="dense", seeds="0")
  runs = [RUN, dataclasses.replace(RUN, width=DENSE)]
  assert outline.line(runs, alone) == (
    "2 rows = 1 mechanism + 1 counterpart; 2 runs"
  )
  grid = {"optimizer": {"learning_rate": (1e-3, 3e-3, 1e-2)}}
  tuned = comparison(attention="dense", seeds="0,1,2", grid=grid)
  runs = [
    dataclasses.replace(
      RUN, grid={"optimizer.learning_rate": rate}, choosing=True
    ).with_seed(seed)
    for seed in (10000, 10001)
    for rate in (1e-3, 3e-3, 1e-2)
  ]
  assert outline.line(runs, tuned) == (
    "1 row = 1 mechanism; 3 runs, and 6 that choose a point of the grid"
  )


def test_the_time_is_that_of_a_step_of_the_first_row(tmp_path):
  runs = rows("dense", "delta")
  # 4 runs of 60 steps of 2 s and a start of 10 s, and 2 shapes of 4 programs.
  cost = {"step_seconds": 2.0, "compile_seconds": 5.0}
  records.store_step_cost(tmp_path, runs[0], cost)
  two = comparison(attention="dense,delta", seeds="0,1")
  assert outline.duration(runs, two, tmp_path) == (
    "about 9 minutes if all are as fast as dense"
  )
  budget = [dataclasses.replace(x, budget_seconds=50.0, steps=0) for x in runs]
  assert outline.duration(budget, two, tmp_path) == "about 4 minutes"
  for seconds, told in (
    (1475.0, "about 99 minutes"),
    (1490.0, "about 2 hours"),
    (3590.0, "about 4 hours"),
  ):
    long = [dataclasses.replace(x, budget_seconds=seconds) for x in runs]
    assert outline.duration(long, two, tmp_path) == told
  short = [dataclasses.replace(runs[0], budget_seconds=1.0)]
  assert outline.duration(short, two, tmp_path) == "about 1 minute"
  # Of three points with two choosing seeds, six runs; then three seeds of one point.
  grid = {"optimizer": {"learning_rate": (1e-3, 3e-3, 1e-2)}}
  tuned = comparison(attention="dense", seeds="0,1,2", grid=grid)
  choosing = [
    dataclasses.replace(runs[0], budget_seconds=590.0, choosing=True)
  ] * 6
  told = "about 90 minutes"
  assert outline.duration(choosing, tuned, tmp_path) == told


@pytest.mark.parametrize("fails", [False, True])
def test_no_time_is_told_where_no_step_can_be_timed(
  fails, tmp_path, monkeypatch
):
  def time_step(folder, run):
    if fails:
      raise RunError("out of memory")

  monkeypatch.setattr(outline.worker, "time_step", time_step)
  assert outline.duration(rows("dense"), comparison(), tmp_path) == ""


def test_help_has_the_fields_of_the_comparison_and_of_its_runs():
  mapping = recall.get_config()
  mapping.attention = "dense,delta"
  lines = outline.fields(mapping).splitlines()
  own, of_runs = (
    lines.index(x)
    for x in (
      "Fields of this comparison:",
      "Fields of its runs, with the values of recall and dense:",
    )
  )
  across = "  --config.across.model.short_convolution=[False, True]"
  assert own < lines.index("  --config.attention=dense,delta") < of_runs
  assert own < lines.index(across) < of_runs
  # Of the comparison, which differs from configs/recall.py.
  assert of_runs < lines.index("  --config.model.features=64")
  assert parse(mapping).fields("recall")["model.features"] == 64
