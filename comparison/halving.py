"""Successive halving: which points of a grid are trained to their end.

At each rung, a share of the steps, the worse half of the points of the grid of a row
is stopped, by the loss on the first held-out split. If the first seed chooses, the
other seeds run only the point that is left: four points and rungs 1/4 and 1/2 take
4/4 + 2/4 + 1/2 = 2 runs where the whole grid takes 4, and 4 of 12 with three seeds.
If the mean over all seeds chooses, they take 6 of 12, and no seed chooses for the
others; a point with a run that failed is then behind all points without one.

Paper: Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
from pathlib import Path
import statistics

from comparison import launch as launch_lib
from comparison import records
from comparison.config import ALL, Comparison
from comparison.plan import Run

Group = list[Run]
"""All runs of one row of a table, those of the first seed first."""


def groups(runs: Sequence[Run]) -> list[Group]:
  """The runs of a plan by task, mechanism and point of `across`, in its order."""
  found: dict[tuple[str, str, str], Group] = {}
  for run in runs:
    point = json.dumps(run.across, sort_keys=True)
    found.setdefault((run.task, run.attention, point), []).append(run)
  return list(found.values())


def launch(
  of_runs: Sequence[Group],
  workdir: Path,
  comparison: Comparison,
  after: Callable[[], None] = lambda: None,
) -> None:
  """`launch.launch` of all groups, some of whose runs the rungs stop early.

  The seeds that choose come first in every group, before the others of any.

  Args:
    of_runs: of the plan, or one shard of it.
    workdir: of the comparison.
    comparison: whose plan it is; it has the rungs and says which seeds choose.
    after: as in `launch.launch`.
  """
  together, rungs = comparison.together, comparison.rungs
  is_all = comparison.choosing_seeds == ALL
  map_seed = comparison.seed_numbers[0]
  later = []
  for group in of_runs:
    first = group[0].seed
    choosing = [run for run in group if is_all or run.seed == first]
    others = [run for run in group if not is_all and run.seed != first]
    able = [run for run in choosing if not run.obstacle]
    for share in rungs if len(_families(able)) > 1 else ():
      able = _after_rung(able, workdir, share, together)
    unable = [run for run in choosing if run.obstacle]
    launch_lib.launch([*able, *unable], workdir, map_seed, together, after)
    if others and len(able) > 1:
      losses = [_final_loss(run, workdir) for run in able]
      family = best_first(_means(able, losses))[0]
      able = [run for run in able if run.family == family]
    later += [run for run in others if run.obstacle]
    for run in others:
      if run.obstacle:
        continue
      if run.family == able[0].family:
        later.append(run)
      else:
        _stop(run, workdir, f"seed {first} chose {_told(able[0])}")
  launch_lib.launch(later, workdir, map_seed, together, after)


def best_first(losses: Mapping[str, float]) -> list[str]:
  """Points of a grid by their loss; one that is not finite is the worst."""
  finite = {
    name: loss if math.isfinite(loss) else math.inf
    for name, loss in losses.items()
  }
  return sorted(finite, key=finite.__getitem__)


def _families(runs: Sequence[Run]) -> list[str]:
  """Points of the grid, each once: a point is all seeds of a family."""
  return list(dict.fromkeys(run.family for run in runs))


def _means(runs: Sequence[Run], losses: Sequence[float]) -> dict[str, float]:
  """Mean loss over the seeds of each point."""
  found: dict[str, list[float]] = {}
  for run, loss in zip(runs, losses, strict=True):
    found.setdefault(run.family, []).append(loss)
  return {family: statistics.fmean(of) for family, of in found.items()}


def _after_rung(
  runs: Group, workdir: Path, share: float, together: str
) -> Group:
  """Runs of the better half of the points, rounded up; the others are stopped."""
  losses = _means(runs, launch_lib.losses_at(runs, workdir, share, together))
  order = best_first(losses)
  kept = order[: math.ceil(len(order) / 2)]
  for run in runs:
    if run.family not in kept:
      why = (
        f"loss {losses[run.family]:.4g} after {share:.3g} of the steps, where "
        f"{losses[kept[-1]]:.4g} went on"
      )
      _stop(run, workdir, why)
  return [run for run in runs if run.family in kept]


def _final_loss(run: Run, workdir: Path) -> float:
  """At the end, on the first held-out split; infinite where the run failed."""
  if records.status(workdir, run) == records.FAILED:
    return math.inf
  lines = records.history(workdir, run)
  held_out = [line for line in lines if line["split"] != "train"]
  if not held_out:
    return math.inf
  last = [x for x in held_out if x["split"] == held_out[0]["split"]][-1]
  return last["loss"]


def _stop(run: Run, workdir: Path, why: str) -> None:
  """Says in a run's record that it is not continued, unless it has ended."""
  ended = (records.DONE, records.TRAINED, records.STOPPED_EARLY)
  if records.status(workdir, run) in ended:
    return
  usage = records.usage(workdir, run)
  history = records.history(workdir, run)
  records.write(
    workdir,
    run,
    status=records.STOPPED_EARLY,
    reason=why,
    history=history,
    **usage,
  )
  print(f"  stopped early: {run.identity}: {why}", flush=True)


def _told(run: Run) -> str:
  """A point of the grid: 'learning_rate=0.003'."""
  return ", ".join(
    f"{leaf.rpartition('.')[2]}={value}" for leaf, value in run.grid.items()
  )
