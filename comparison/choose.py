"""Which point of the grid a row is reported with: successive halving, and beyond.

Every point is trained with seeds that only choose. At each rung, a share of the
steps, the worse half of the points is stopped, by the mean loss over these seeds on
the first held-out split; of those that are left the best at the end is chosen. Where
that has the lowest or highest value of a leaf, one value beyond it competes as well.

Paper: Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any

from comparison import plan, records
from comparison.config import Comparison
from comparison.launch import launch
from comparison.plan import Run, grouped
from settings.errors import ConfigError


def choose(runs: Sequence[Run], workdir: Path, comparison: Comparison) -> Run:
  """Trains the choosing runs of a row as far as they go; the point they choose.

  What is trained already is not trained again, so that the choice is the same
  whenever it is asked for.

  Args:
    runs: every point of the grid of a row, with every seed that chooses.
    workdir: of the comparison.
    comparison: whose plan they are of.

  Returns:
    A run at the chosen point with its `at_edge`, for other seeds; the first run
    where no point can be.

  Raises:
    RunError: a record cannot be written.
  """
  launch([run for run in runs if run.obstacle], workdir, comparison)
  candidates = [run for run in runs if not run.obstacle]
  if not candidates:
    return runs[0]
  for share in comparison.halving.rungs:
    candidates = _better_half(candidates, workdir, comparison, share)
  launch(candidates, workdir, comparison)
  loss, best = _ranked(candidates, workdir)[0]
  values_by_leaf = {
    leaf: set(values) for leaf, values in comparison.grid_values.items()
  }
  # Where no point could be trained, none beyond can be.
  for run in _outer_points(best[0], comparison) if loss < math.inf else ():
    new = [run.with_seed(x, choosing=True) for x in comparison.choosing_seeds]
    records.plan(workdir, new)
    launch(new, workdir, comparison)
    candidates += new
    for leaf, value in run.grid.items():
      values_by_leaf[leaf].add(value)
  _, (chosen, *_) = _ranked(candidates, workdir)[0]
  point = ", ".join(f"{leaf}={value}" for leaf, value in chosen.grid.items())
  print(f"{chosen.row}: chosen {point}", flush=True)
  edge = [
    x for x in values_by_leaf if chosen.grid[x] in _ends(values_by_leaf[x])
  ]
  return dataclasses.replace(chosen, at_edge=edge)


def beyond(value: Any, values: Collection[Any]) -> float | None:
  """The value that continues a geometric grid beyond its end.

  Returns:
    end² / neighbour: whole in a grid of whole numbers, else to three digits.
    None where `value` is not an end of the grid, where that has fewer than two
    values or one that is not positive, or where rounding leads nowhere new.
  """
  if value not in _ends(values):
    return None
  *_, neighbour, end = sorted(values, reverse=value == min(values))
  following = end * end / neighbour
  if all(isinstance(x, int) for x in values):
    return round(following) if round(following) not in (0, end) else None
  return float(f"{following:.3g}")


def _ends(values: Collection[Any]) -> tuple[Any, ...]:
  """The lowest and the highest value; none where they are no positive numbers."""
  are_positive = all(
    isinstance(x, int | float) and not isinstance(x, bool) and x > 0
    for x in values
  )
  several = are_positive and len(set(values)) > 1
  return (min(values), max(values)) if several else ()


def _outer_points(run: Run, comparison: Comparison) -> Iterator[Run]:
  """Points beyond the ends of the grid that a run is at, where they can be."""
  for leaf, values in comparison.grid_values.items():
    value = beyond(run.grid[leaf], values)
    if value is None:
      continue
    further = dataclasses.replace(run, grid=run.grid | {leaf: value})
    try:
      new = plan.planned(comparison, further)
    except ConfigError:  # As a rate of dropout beyond 1.
      continue
    if not new.obstacle:
      yield new


def _better_half(
  runs: Sequence[Run], workdir: Path, comparison: Comparison, share: float
) -> list[Run]:
  """Runs of the better half of the points, rounded up; the others are stopped."""
  if len(grouped(runs, "family")) < 2:
    return list(runs)
  launch(runs, workdir, comparison, share)
  ranked = _ranked(runs, workdir, share)
  half = math.ceil(len(ranked) / 2)
  for loss, point in ranked[half:]:
    reason = (
      f"loss {loss:.4g} after {share:.3g} of the steps, where "
      f"{ranked[half - 1][0]:.4g} went on"
    )
    for run in point:
      if records.status(workdir, run) == records.STOPPED:
        stopped = {"status": records.STOPPED_EARLY, "reason": reason}
        history = records.history(workdir, run)
        records.update(workdir, run.identity, **stopped, history=history)
        print(f"  {run.identity}: stopped early: {reason}", flush=True)
  return [run for _, point in ranked[:half] for run in point]


def _ranked(
  runs: Sequence[Run], workdir: Path, share: float | None = None
) -> list[tuple[float, list[Run]]]:
  """Mean loss of each point and its runs, the best first; failed ones are infinite.

  The loss is that after a share of the steps, or at the end.
  """

  def loss(run: Run) -> float:
    value = None
    if share is not None:
      value = records.loss_at(workdir, run, share)
    elif records.status(workdir, run) == records.DONE:
      value = list(records.losses(workdir, run).values())[-1]
    return value if value is not None and math.isfinite(value) else math.inf

  points = grouped(runs, "family")
  means = [statistics.fmean(map(loss, point)) for point in points]
  ranked = zip(means, points, strict=True)
  return sorted(ranked, key=lambda mean_and_point: mean_and_point[0])
