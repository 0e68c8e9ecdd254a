"""Chooses the grid point that is reported for a row, by successive halving.

Every point is trained with choosing seeds, which are not reported. At each rung, a
share of the steps, the worse half of the points is stopped, by the mean loss over
these seeds on the first held-out split. At the end, the best of the remaining points
is chosen: the one with the lowest mean loss; on an all-or-nothing task, the one that
most seeds solve, with ties broken by the loss. If the chosen point has the lowest or
highest value of a config field, one value beyond it becomes a candidate as well.

Paper: Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple

from comparison import criterion, plan, records
from comparison.config import Comparison
from comparison.launch import launch
from comparison.planned_run import Run, group_by
from settings.errors import ConfigError


class Score(NamedTuple):
  """The score of a grid point; lower is better."""

  unsolved: int  # Number of seeds that did not solve the task.
  loss: float  # The mean over seeds; infinite if one of them failed.


def warning(runs: Sequence[Run], comparison: Comparison) -> str:
  """Warns if halving may stop a point that would later solve its task; else ''."""
  tasks = sorted({run.task for run in runs if run.solved_at is not None})
  rungs = comparison.halving.rungs
  if not tasks or not rungs or not comparison.choosing_seeds:
    return ""
  return (
    f"warning: {', '.join(tasks)}: all or nothing, and halving.rungs="
    f"{','.join(f'{x:g}' for x in rungs)} stops points by the loss, which says little "
    "before a task is solved; a point that would solve it later may be stopped. "
    '--config.halving.rungs="()" --config.halving.seeds=4 trains all to the end'
  )


def choose(runs: Sequence[Run], workdir: Path, comparison: Comparison) -> Run:
  """Trains the choosing runs of a row, and returns a run at the point they choose.

  Runs that are done are not trained again, so a repeated call makes the same choice.

  Args:
    runs: every point of the grid of a row, with every choosing seed.
    workdir: the folder of the comparison.
    comparison: the comparison of these runs.

  Returns:
    A run at the chosen point, with `at_edge`, as a template for other seeds; the first
    run if no point can run.

  Raises:
    RunError: a record cannot be written.
  """
  launch([run for run in runs if run.obstacle], workdir, comparison)
  candidates = [run for run in runs if not run.obstacle]
  if not candidates:
    return runs[0]
  previous = 0.0
  for share in comparison.halving.rungs:
    if _is_new_rung(candidates, workdir, share, previous):
      candidates = _better_half(candidates, workdir, comparison, share)
    previous = share
  launch(candidates, workdir, comparison)
  score, best = _rank(candidates, workdir)[0]
  values_by_field = {
    field: set(values) for field, values in comparison.grid_values.items()
  }
  # If no point could be trained, a point beyond the grid cannot be either.
  is_trained = score < (len(best), math.inf)
  for run in _outer_points(best[0], comparison) if is_trained else ():
    outer = [run.with_seed(x, choosing=True) for x in comparison.choosing_seeds]
    records.plan(workdir, outer)
    launch(outer, workdir, comparison)
    candidates += outer
    for field, value in run.grid.items():
      values_by_field[field].add(value)
  score, (choice, *others) = _rank(candidates, workdir)[0]
  point = ", ".join(f"{field}={value}" for field, value in choice.grid.items())
  seeds = 1 + len(others)
  if choice.solved_at is not None:
    point += f", solved by {seeds - score.unsolved} of {seeds} choosing seeds"
  print(f"{choice.row}: chosen {point}", flush=True)
  edge = [
    x for x in values_by_field if choice.grid[x] in _ends(values_by_field[x])
  ]
  return dataclasses.replace(choice, at_edge=edge)


def next_grid_value(value: Any, values: Collection[Any]) -> float | None:
  """Returns the value that continues a geometric grid beyond its end.

  Returns:
    end² / neighbour, an integer in a grid of integers and else rounded to three digits.
    None if `value` is not an end of the grid, if the grid has fewer than two values or
    a value that is not positive, or if rounding gives no new value.
  """
  if value not in _ends(values):
    return None
  *_, neighbour, end = sorted(values, reverse=value == min(values))
  following = end * end / neighbour
  if all(isinstance(x, int) for x in values):
    return round(following) if round(following) not in (0, end) else None
  rounded = float(f"{following:.3g}")
  return None if rounded in values else rounded


def _ends(values: Collection[Any]) -> tuple[Any, ...]:
  """Returns the lowest and the highest value; empty unless all are positive numbers."""
  are_positive = all(
    isinstance(x, int | float) and not isinstance(x, bool) and x > 0
    for x in values
  )
  has_ends = are_positive and len(set(values)) > 1
  return (min(values), max(values)) if has_ends else ()


def _outer_points(run: Run, comparison: Comparison) -> Iterator[Run]:
  """Yields a run beyond each end of the grid at which a run is, if it can run."""
  for field, values in comparison.grid_values.items():
    value = next_grid_value(run.grid[field], values)
    if value is None:
      continue
    outer = dataclasses.replace(run, grid=run.grid | {field: value})
    try:
      outer = plan.complete(comparison, outer)
    except ConfigError:  # For example, a dropout rate above 1.
      continue
    if not outer.obstacle:
      yield outer


def _is_new_rung(
  runs: Sequence[Run], workdir: Path, share: float, previous: float
) -> bool:
  """Returns whether a rung is after the previous one and before the end of any run.

  In a short run, several rungs may be at one step, where only one half is stopped.
  """
  for run in runs:
    count = records.steps(workdir, run)
    if count is None:
      return True
    earlier = records.step_at(count, previous) if previous else 0
    if earlier < records.step_at(count, share) < count:
      return True
  return False


def _better_half(
  runs: Sequence[Run], workdir: Path, comparison: Comparison, share: float
) -> list[Run]:
  """Stops the worse half of the points, and returns the runs of the better half.

  The number of points of the better half is rounded up.
  """
  if len(group_by(runs, "family")) < 2:
    return list(runs)
  launch(runs, workdir, comparison, share)
  ranked = _rank(runs, workdir, share)
  half = math.ceil(len(ranked) / 2)
  limit = ranked[half - 1][0].loss
  for (_, loss), point in ranked[half:]:
    reason = f"loss {loss:.4g} after {share:.3g} of the steps; the limit was {limit:.4g}"
    for run in point:
      if records.status(workdir, run) == records.STOPPED:
        stopped = {"status": records.STOPPED_EARLY, "reason": reason}
        history = records.history(workdir, run)
        records.update(workdir, run.identity, **stopped, history=history)
        print(f"  {run.identity}: stopped early: {reason}", flush=True)
  return [run for _, point in ranked[:half] for run in point]


def _rank(
  runs: Sequence[Run], workdir: Path, share: float | None = None
) -> list[tuple[Score, list[Run]]]:
  """Ranks the points with their runs, best first; the loss of a failed run is infinite.

  After a share of the steps, the mean loss decides. At the end, the number of seeds
  that solved the task decides, and the mean loss breaks ties.
  """

  def loss(run: Run) -> float:
    value = None
    if share is not None:
      value = records.loss_at(workdir, run, share)
    elif records.status(workdir, run) == records.DONE:
      value = _last_evaluation(run, workdir)["loss"]
    return value if value is not None and math.isfinite(value) else math.inf

  def is_solved(run: Run) -> bool:
    if share is not None or records.status(workdir, run) != records.DONE:
      return False
    return criterion.is_solved(_last_evaluation(run, workdir), run.solved_at)

  ranked = []
  for point in group_by(runs, "family"):
    unsolved = len(point) - sum(map(is_solved, point))
    mean = statistics.fmean(map(loss, point))
    ranked.append((Score(unsolved, mean), point))
  return sorted(ranked, key=lambda score_and_point: score_and_point[0])


def _last_evaluation(run: Run, workdir: Path) -> dict[str, Any]:
  """The last evaluation of a run on the first held-out split."""
  return list(records.evaluations(workdir, run).values())[-1]
