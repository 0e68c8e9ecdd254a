"""Describes a comparison in one line, and its config fields for `--help`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
import textwrap
from typing import Any

from comparison import config, plan, records, worker
from comparison.config import Comparison
from comparison.layers import BASELINE
from comparison.planned_run import DENSE, Run, group_by, titles
from settings.errors import RunError
from settings.field_values import flatten
from training.commands import config_help

_PROGRAMS = 4
"""Programs that a run compiles: step, evaluation, decoding, and the timed step."""

_START_SECONDS = 10.0
"""Time to start the processes that train and measure a run, in seconds."""


def line(runs: Sequence[Run], comparison: Comparison) -> str:
  """Counts rows and runs: '4 rows = 2 mechanisms × features 16, 32; 8 runs'.

  Args:
    runs: the plan, or the part of it that this process runs.
    comparison: the comparison of the plan.
  """
  rows = [row[0] for row in group_by(runs, "row")]
  factors = [_count_noun(len({run.attention for run in rows}), "mechanism")]
  if (tasks := len({run.task for run in rows})) > 1:
    factors.insert(0, _count_noun(tasks, "task"))
  points = list(comparison.across_points())
  for field, title in titles(points[0]).items():
    values = dict.fromkeys(str(point[field]) for point in points)
    factors.append(f"{title} {', '.join(values)}")
  text = f"{_count_noun(len(rows), 'row')} = {' × '.join(factors)}"
  if counterparts := sum(run.width == DENSE for run in rows):
    text += f" + {_count_noun(counterparts, 'counterpart')}"
  runnable_rows = {run.row for run in runs if not run.obstacle}
  if len(runnable_rows) < len(rows):
    text += f", of which {len(rows) - len(runnable_rows)} cannot run"
  text += (
    f"; {_count_noun(len(runnable_rows) * len(comparison.seed_numbers), 'run')}"
  )
  if comparison.choosing_seeds:
    choosing = sum(not run.obstacle for run in runs)
    text += f", and {choosing} that choose a point of the grid"
  return text


def duration(runs: Sequence[Run], comparison: Comparison, folder: Path) -> str:
  """Estimates the time of all runs: 'about 12 minutes if all are as fast as dense'.

  The first row of each task gives the time of a step, which is measured now if the
  folder does not have it. The text is '' if it cannot be measured.

  Args:
    runs: the plan, or the part of it that this process runs.
    comparison: the comparison of the plan.
    folder: the folder of the comparison.
  """
  seconds, repeats = 0.0, 1.0
  timed: dict[str, Run] = {}
  compiled: set[str] = set()
  if comparison.choosing_seeds:  # The reported seeds run only the chosen point.
    points = len(list(comparison.grid_points()))
    choosing = len(comparison.choosing_seeds)
    repeats += len(comparison.seed_numbers) / (points * choosing)
  for run in runs:
    if run.obstacle:
      continue
    if run.budget_seconds is not None:
      seconds += repeats * (run.budget_seconds + _START_SECONDS)
      continue
    first = timed.setdefault(run.task, run)
    try:
      cost = records.step_cost(folder, first)
      if cost is None:
        worker.time_step(folder, first)
        cost = records.step_cost(folder, first)
    except RunError:
      return ""
    if cost is None:
      return ""
    training = run.steps * cost["step_seconds"]
    seconds += repeats * (training + _START_SECONDS)
    # Runs of the same shape read the compiled programs from disk.
    if run.shape not in compiled:
      compiled.add(run.shape)
      seconds += _PROGRAMS * cost["compile_seconds"]
  basis = ", ".join(dict.fromkeys(run.attention for run in timed.values()))
  speed = f" if all are as fast as {basis}" if basis else ""
  minutes = max(1, round(seconds / 60))
  if minutes < 100:
    return f"about {_count_noun(minutes, 'minute')}{speed}"
  return f"about {minutes / 60:.0f} hours{speed}"


def fields(mapping: Mapping[str, Any], typed: Iterable[str] = ()) -> str:
  """Lists the fields of a comparison's config and of its runs, for `--help`.

  Args:
    mapping: the config.
    typed: config fields that the command line has set.

  Raises:
    ConfigError: the config is invalid.
  """
  comparison = config.parse(mapping, typed)
  lines = ["Fields of this comparison:", *config_help.lines(comparison)]
  for name in ("variants", "grid", "across", "per_task", "references"):
    meaning = config_help.meanings(Comparison)[name]
    values = flatten(getattr(comparison, name))
    lines += [f"  --config.{name}.{x}={y}" for x, y in values.items()]
    if not values:
      lines.append(f"  --config.{name}.…")
    indent = " " * 6
    lines += textwrap.wrap(
      meaning,
      config_help.WIDTH,
      initial_indent=indent,
      subsequent_indent=indent,
    )
  task, *others = comparison.task_names
  run = plan.config_of(task, BASELINE, comparison.fields(task))
  lines += [
    "",
    f"Fields of its runs, with the values of {task} and {BASELINE}:",
  ]
  lines += config_help.run_lines(run)
  lines += [
    f"`python train.py --config=configs/{other}.py --help` has those of {other}."
    for other in others
  ]
  return "\n".join(lines)


def _count_noun(count: int, noun: str) -> str:
  return f"{count:,} {noun}{'s'[: count != 1]}"
