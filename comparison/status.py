"""What a comparison has done, what it does, and when it will be done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
import socket
import statistics
import time
from typing import Any

import psutil

from comparison import records
from training import atomic, metrics

_RUNNING, _WAITING = "running", "waiting"
_STATES = (records.DONE, _RUNNING, _WAITING, records.FAILED)
_RARE_STATES = (records.STOPPED_EARLY, records.UNSUPPORTED)

# A run takes as long as those that are done and have most of these in common.
_ALIKE = (("task", "attention", "across"), ("task", "attention"), ("task",), ())


def text(workdir: Path) -> str:
  """Lines for a person: counts, what runs, what failed, and the time left.

  A run takes as long as those that are done of its task and mechanism and at its
  point of `across`, or as those of its task and mechanism, or as those of its task,
  or as all, less what it has been trained so far. Runs of the report whose point of
  the grid is still to be chosen wait.
  """
  run_records = records.by_identity(workdir)
  plan, processes = _plan(workdir, run_records), _processes(workdir)
  states: dict[str, list[str]] = {}
  for name in plan:
    status = run_records.get(name, {}).get("status", _WAITING)
    # A process of several runs has all of them until the last has ended.
    if name in processes and status != records.DONE:
      status = _RUNNING
    elif status in (records.STOPPED, records.TRAINED):
      status = _WAITING
    states.setdefault(status, []).append(name)
  names = [*_STATES, *(x for x in _RARE_STATES if x in states)]
  counts = ", ".join(f"{len(states.get(x, ()))} {x}" for x in names)
  lines = [f"{workdir}: {len(plan)} runs: {counts}"]
  for name in states.get(_RUNNING, ()):
    step, _ = _trained(workdir, name)
    total = f" of {plan[name]['steps']}" if plan[name].get("steps") else ""
    lines.append(
      f"running  {name}: {f'step {step}{total}' if step else 'begins'}"
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
      "no run is done yet that was never stopped, so nobody knows how long the "
      "others take"
    )
  elif queue:
    seconds = 0.0
    for name in queue:
      if run_records.get(name, {}).get("status") != records.TRAINED:
        _, spent = _trained(workdir, name)
        seconds += max(0.0, _expected(plan[name], done) - spent)
    lines.append(_clock(seconds, max(1, len(set(processes.values())))))
  return "\n".join(lines)


def missing(workdir: Path) -> list[str]:
  """A line on how many runs there are, where some are still to be made."""
  run_records = records.by_identity(workdir)
  states = [
    run_records.get(name, {}).get("status", _WAITING)
    for name in _plan(workdir, run_records)
  ]
  open_count = sum(x in (_WAITING, records.STOPPED) for x in states)
  if not open_count:
    return []
  done = sum(x in (records.DONE, records.TRAINED) for x in states)
  more = "".join(
    f", {states.count(x)} {x}"
    for x in (records.FAILED, *_RARE_STATES)
    if x in states
  )
  return [
    f"{done} of {len(states)} runs done{more}; what follows may change with the "
    "others."
  ]


def _plan(
  workdir: Path, run_records: Mapping[str, records.Record]
) -> dict[str, dict[str, Any]]:
  """Every run that is known: of the plan, and of records beside it."""
  planned = records.planned(workdir)
  # A plan of an older version says less than its records.
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
  """Run -> its machine and process, which is alive, or on another machine."""
  processes = {}
  for path in sorted((workdir / records.RUNNING).glob("*.json")):
    owner = atomic.read_json(path)
    is_local = owner and owner["host"] == socket.gethostname()
    if owner and (not is_local or psutil.pid_exists(owner["process"])):
      processes[path.stem] = (owner["host"], owner["process"])
  return processes


def _trained(workdir: Path, name: str) -> tuple[int, float]:
  """Steps and seconds that a run has been trained so far."""
  lines = metrics.read(workdir / records.RUNS / name)
  return (lines[-1]["step"], lines[-1]["seconds"]) if lines else (0, 0.0)


def _expected(run: Mapping[str, Any], done: Sequence[records.Record]) -> float:
  """Mean seconds of the runs that are most like one."""
  for names in _ALIKE:
    alike = [
      other["seconds"]
      for other in done
      if all(other.get(name) == run.get(name) for name in names)
    ]
    if alike:
      return statistics.fmean(alike)
  raise AssertionError  # All runs have nothing in common, at least.


def _clock(seconds: float, processes: int) -> str:
  minutes = round(seconds / processes / 60)
  end = time.strftime(
    "%d %B, %H:%M", time.localtime(time.time() + 60 * minutes)
  )
  return (
    f"about {minutes // 60}:{minutes % 60:02d} hours left with {processes} at a "
    f"time, until {end}; measuring not counted"
  )
