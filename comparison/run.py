"""Runs a comparison: chooses a grid point for each row, then trains the row's runs."""

from collections.abc import Callable
from pathlib import Path

from comparison import choose, outline, plan, records
from comparison import folder as folder_lib
from comparison.config import Comparison
from comparison.launch import launch
from comparison.planned_run import group_by
from settings.errors import RunError
from training import ownership


def run(
  comparison: Comparison,
  folder: Path,
  shard: tuple[int, int] = (1, 1),
  after: Callable[[], None] = lambda: None,
) -> None:
  """Trains and measures the runs of a comparison that have no result yet.

  A comparison that is killed and started again continues, and gives the same numbers.

  Args:
    comparison: the comparison to run.
    folder: a new folder, or the folder of this comparison.
    shard: (i, n) runs the i-th of n parts of the rows, counted from 1.
    after: called whenever all runs of one shape have ended.

  Raises:
    ConfigError: the folder has other content, or a config is invalid.
    RunError: no row can run, or a record cannot be written.
  """
  shared = folder_lib.shared(comparison)
  records.check(folder, shared)
  # Before the folder is created, because planning may raise an error.
  runs = plan.plan(comparison)
  for line in plan.obstacle_lines(runs):
    print(line, flush=True)
  if all(run.obstacle for run in runs):
    raise RunError("nothing can be trained; choose other mechanisms or tasks")
  plan.check_reference(runs, comparison.reference)
  shared[ownership.DATA] = plan.data(runs)
  seeds = comparison.seed_numbers
  has_choice = bool(comparison.choosing_seeds)
  records.claim(folder, shared)
  records.retry_unsupported(folder, runs)
  records.plan(folder, runs, seeds if has_choice else ())
  records.write_references(folder, comparison.references)
  for line in plan.counterpart_lines(runs):
    print(line)
  if line := choose.warning(runs, comparison):
    print(line)
  first, step = shard
  rows = group_by(runs, "row")[first - 1 :: step]
  names = {row[0].row for row in rows}
  # In the plan, all rows come before the next seed, so that each has a result early.
  runs = [run for run in runs if run.row in names]
  time = outline.duration(runs, comparison, folder)
  text = outline.line(runs, comparison)
  print(f"{folder}: {', '.join(filter(None, (text, time)))}", flush=True)
  if not has_choice:
    launch(runs, folder, comparison, after=after)
    return
  for number, row in enumerate(rows, 1):
    print(f"[row {number}/{len(rows)}] {row[0].row}", flush=True)
    choice = choose.choose(row, folder, comparison)
    reported = [choice.with_seed(seed, choosing=False) for seed in seeds]
    records.plan(folder, reported)
    launch(reported, folder, comparison, after=after)


def check_trained(folder: Path) -> None:
  """Raises RunError if every run that a comparison tried has failed."""
  statuses = {record["status"] for record in records.read(folder)[0]}
  if statuses - {records.UNSUPPORTED} == {records.FAILED}:
    raise RunError(
      "nothing was trained: every run failed; its row has the reason"
    )
