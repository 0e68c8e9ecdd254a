"""The status of a comparison: done, running and waiting runs, and the time left."""

from collections.abc import Mapping, Sequence
from pathlib import Path
import socket
import statistics
import time
from typing import Any

import psutil

from comparison import records
from settings import atomic
from training import metrics

_RUNNING, _WAITING = "running", "waiting"
_STATES = (records.DONE, _RUNNING, _WAITING, records.FAILED)
_RARE_STATES = (records.STOPPED_EARLY, records.UNSUPPORTED)

_SIMILARITIES = (
  ("task", "attention", "across"),
  ("task", "attention"),
  ("task",),
  (),
)
"""Fields that similar runs share. The first that a done run has in common is used."""


def text(workdir: Path) -> str:
  """Returns a text with counts, running and failed runs, and the time left.

  The time of a run is the mean of the done runs with its task, mechanism and point of
  `across`; or with its task and mechanism; or with its task; or of all; minus its
  training time so far. Reported runs whose grid point is not chosen yet are waiting.
  """
  run_records = records.by_identity(workdir)
  plan, processes = _plan(workdir, run_records), _processes(workdir)
  states: dict[str, list[str]] = {}
  for name in plan:
    status = run_records.get(name, {}).get("status", _WAITING)
    if name in processes and status != records.DONE:
      status = _RUNNING
    elif status in (records.STOPPED, records.TRAINED):
      status = _WAITING
    states.setdefault(status, []).append(name)
  names = [*_STATES, *(x for x in _RARE_STATES if x in states)]
  counts = ", ".join(f"{len(states.get(x, ()))} {x}" for x in names)
  lines = [f"{workdir}: {len(plan)} runs: {counts}"]
  for name in states.get(_RUNNING, ()):
    step, _ = _training_progress(workdir, name)
    total = f" of {plan[name]['steps']}" if plan[name].get("steps") else ""
    lines.append(
      f"running  {name}: {f'step {step}{total}' if step else 'starting'}"
    )
  for name in states.get(records.FAILED, ()):
    lines.append(f"failed   {name}: {run_records[name]['reason']}")
  done = [
    record
    for record in run_records.values()
    if record["status"] == records.DONE and "seconds" in record
  ]
  queue = [*states.get(_WAITING, ()), *states.get(_RUNNING, ())]
  if queue and not done:
    lines.append(
      "no run has finished without an interruption yet, so the remaining time is "
      "unknown"
    )
  elif queue:
    seconds = 0.0
    for name in queue:
      if run_records.get(name, {}).get("status") != records.TRAINED:
        _, elapsed = _training_progress(workdir, name)
        seconds += max(0.0, _expected_seconds(plan[name], done) - elapsed)
    lines.append(_clock(seconds, max(1, len(set(processes.values())))))
  return "\n".join(lines)


def missing(workdir: Path) -> list[str]:
  """Returns a line with numbers of runs if some are not done; else no line."""
  run_records = records.by_identity(workdir)
  states = [
    run_records.get(name, {}).get("status", _WAITING)
    for name in _plan(workdir, run_records)
  ]
  num_open = sum(x in (_WAITING, records.STOPPED) for x in states)
  if not num_open:
    return []
  done = sum(x in (records.DONE, records.TRAINED) for x in states)
  more = "".join(
    f", {states.count(x)} {x}"
    for x in (records.FAILED, *_RARE_STATES)
    if x in states
  )
  return [
    f"{done} of {len(states)} runs done{more}; the results below may change."
  ]


def _plan(
  workdir: Path, run_records: Mapping[str, records.Record]
) -> dict[str, dict[str, Any]]:
  """Returns all known runs, from the plan and from records."""
  planned = records.planned_runs(workdir)
  # Plans of older versions have fewer fields than records.
  runs = {
    name: {**run_records.get(name, {}), **planned.get(name, {})}
    for name in {**run_records, **planned}
  }
  row_seeds = {
    (run.get("row"), run.get("seed"))
    for run in runs.values()
    if not run.get("choosing") and records.OPEN not in run
  }
  return {
    name: run
    for name, run in runs.items()
    if records.OPEN not in run or (run["row"], run["seed"]) not in row_seeds
  }


def _processes(workdir: Path) -> dict[str, tuple[str, int]]:
  """Maps runs to their host and process, if it is alive or on another host."""
  processes = {}
  for path in sorted((workdir / records.RUNNING).glob("*.json")):
    owner = atomic.read_json(path)
    is_local = owner and owner["host"] == socket.gethostname()
    if owner and (not is_local or psutil.pid_exists(owner["process"])):
      processes[path.stem] = (owner["host"], owner["process"])
  return processes


def _training_progress(workdir: Path, name: str) -> tuple[int, float]:
  """Returns the steps and seconds of a run's training so far."""
  lines = metrics.read(workdir / records.RUNS / name)
  return (lines[-1]["step"], lines[-1]["seconds"]) if lines else (0, 0.0)


def _expected_seconds(
  run: Mapping[str, Any], done: Sequence[records.Record]
) -> float:
  """Returns the mean seconds of the done runs that are most similar to a run."""
  for names in _SIMILARITIES:
    similar = [
      other["seconds"]
      for other in done
      if all(other.get(name) == run.get(name) for name in names)
    ]
    if similar:
      return statistics.fmean(similar)
  raise AssertionError  # The last entry of `_SIMILARITIES` matches all runs.


def _clock(seconds: float, processes: int) -> str:
  minutes = round(seconds / processes / 60)
  end = time.strftime(
    "%d %B, %H:%M", time.localtime(time.time() + 60 * minutes)
  )
  return (
    f"about {minutes // 60}:{minutes % 60:02d} hours left with {processes} at a "
    f"time, until {end}; without measurements"
  )
