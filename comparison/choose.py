"""Which point of the grid a row is reported with: successive halving, and beyond.

Every point is trained with seeds that only choose. At each rung, a share of the
steps, the worse half of the points is stopped, by the mean loss over these seeds on
the first held-out split; of those that are left the best at the end is chosen. Where
that has the lowest or highest value of a leaf, one value beyond it competes as well.

Paper: Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import statistics
from typing import Any

from comparison import plan, records
from comparison.config import Comparison
from comparison.launch import launch
from comparison.plan import Run
from settings.errors import ConfigError


def choose(runs: Sequence[Run], workdir: Path, comparison: Comparison) -> Run:
  """Trains the choosing runs of a row as far as they go; the point they choose.

  What is trained already is not trained again, so that the choice is the same
  whenever it is asked for.

  Args:
    runs: of one row: every point of the grid with every seed that chooses.
    workdir: of the comparison.
    comparison: that they are of.

  Returns:
    A run at the chosen point with its `at_edge`, for other seeds; the first run
    where no point can be.

  Raises:
    RunError: a record cannot be written.
  """
  launch([run for run in runs if run.obstacle], workdir, comparison)
  able = [run for run in runs if not run.obstacle]
  if not able:
    return runs[0]
  for share in comparison.halving.rungs:
    able = _better_half(able, workdir, comparison, share)
  launch(able, workdir, comparison)
  means = _means(able, workdir)
  best = best_first(means)[0]
  tried = {leaf: set(values) for leaf, values in comparison.grid_values.items()}
  for run in _beyond(_at(able, best), comparison):
    if math.isinf(means[best]):
      break  # No point could be trained.
    new = [run.with_seed(x, choosing=True) for x in comparison.choosing_seeds]
    records.plan(workdir, new)
    launch(new, workdir, comparison)
    able += new
    for leaf, value in run.grid.items():
      tried[leaf].add(value)
  chosen = _at(able, best_first(_means(able, workdir))[0])
  point = ", ".join(f"{leaf}={value}" for leaf, value in chosen.grid.items())
  print(f"{chosen.row}: chosen {point}", flush=True)
  edge = [x for x in tried if chosen.grid[x] in _ends(tried[x])]
  return dataclasses.replace(chosen, at_edge=edge)


def best_first(means: Mapping[str, float]) -> list[str]:
  """Points of a grid by their loss; one that is not finite is the worst."""
  finite = {
    name: loss if math.isfinite(loss) else math.inf
    for name, loss in means.items()
  }
  return sorted(finite, key=finite.__getitem__)


def beyond(value: Any, values: Collection[Any]) -> float | None:
  """One value more in a geometric grid, beyond the end that `value` is.

  Args:
    value: one of `values`.
    values: of a leaf.

  Returns:
    The next value with the ratio of the two at that end, to three digits, or a
    whole number among these; None where `value` is no end, or the values are
    not two positive numbers at least.
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


def _beyond(run: Run, comparison: Comparison) -> Iterator[Run]:
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
  if len({run.family for run in runs}) < 2:
    return list(runs)
  launch(runs, workdir, comparison, share)
  means = _means(runs, workdir, share)
  order = best_first(means)
  kept = order[: math.ceil(len(order) / 2)]
  for run in runs:
    status = records.status(workdir, run)
    if run.family in kept or status != records.STOPPED:
      continue
    why = (
      f"loss {means[run.family]:.4g} after {share:.3g} of the steps, where "
      f"{means[kept[-1]]:.4g} went on"
    )
    records.update(
      workdir,
      run.identity,
      status=records.STOPPED_EARLY,
      reason=why,
      history=records.history(workdir, run),
    )
    print(f"  {run.identity}: stopped early: {why}", flush=True)
  return [run for run in runs if run.family in kept]


def _means(
  runs: Sequence[Run], workdir: Path, share: float | None = None
) -> dict[str, float]:
  """Point of the grid -> mean loss over its seeds, at a rung or at the end."""
  losses: dict[str, list[float]] = {}
  for run in runs:
    if share is not None:
      loss = records.loss_at(workdir, run, share)
    elif records.status(workdir, run) == records.DONE:
      loss = list(records.losses(workdir, run).values())[-1]
    else:  # It failed.
      loss = None
    losses.setdefault(run.family, []).append(math.inf if loss is None else loss)
  return {family: statistics.fmean(x) for family, x in losses.items()}


def _at(runs: Sequence[Run], family: str) -> Run:
  return next(run for run in runs if run.family == family)
