"""What a comparison has done, what it does, and when it will be done."""

from collections.abc import Mapping, Sequence
import os
from pathlib import Path
import socket
import statistics
import time
from typing import Any

from comparison import records
from training import claimed, metrics


def text(workdir: Path) -> str:
  """Lines for a person: counts, what runs, what failed, and the time left.

  A run takes as long as those that are done of its task and mechanism and at its
  point of `across`, or as those of its task and mechanism, or as those of its task,
  or as all; what runs now, and what was stopped, has a part of that behind it. The
  runs of one process share its time.

  Args:
    workdir: of the comparison.
  """
  plan = records.planned(workdir)
  by_path = records.by_path(workdir)
  found = {path.stem: record for path, record in by_path}
  # A plan of an older version says nothing of `across`.
  known = {
    name: {
      "task": record["task"],
      "attention": record["attention"],
      "across": record.get("across", {}),
    }
    for name, record in found.items()
  }
  plan = {
    name: {**known.get(name, {}), **plan.get(name, {})}
    for name in {**known, **plan}
  }
  announced = _running(workdir)
  # A process of several runs announces all of them until the last has ended.
  running = {
    name
    for name in announced
    if found.get(name, {}).get("status") != records.DONE
  }
  groups: dict[str, list[str]] = {}
  for name in plan:
    status = found.get(name, {}).get("status", "waiting")
    if name in running:
      status = "running"
    elif status in (records.STOPPED, records.TRAINED):
      status = "waiting"
    groups.setdefault(status, []).append(name)
  order = (records.DONE, "running", "waiting", records.FAILED)
  counts = [f"{len(groups.get(status, ()))} {status}" for status in order]
  for status in (records.STOPPED_EARLY, records.UNSUPPORTED):
    if status in groups:
      counts.append(f"{len(groups[status])} {status}")
  lines = [f"{workdir}: {len(plan)} runs: {', '.join(counts)}"]
  for name in groups.get("running", ()):
    lines.append(f"running  {name}: {_progress(workdir, name, plan[name])}")
  for name in groups.get(records.FAILED, ()):
    lines.append(f"failed   {name}: {found[name]['reason']}")
  waiting = [*groups.get("waiting", ()), *groups.get("running", ())]
  if waiting:
    written = {path.stem: path.stat().st_mtime for path, _ in by_path}
    ahead = _ahead(plan, found, waiting)
    lines.append(_left(ahead, announced, written))
  return "\n".join(lines)


def _running(workdir: Path) -> dict[str, Mapping[str, Any]]:
  """Runs whose process is alive; of other machines, all that say so."""
  found: dict[str, Mapping[str, Any]] = {}
  for path in sorted((workdir / records.RUNNING).glob("*.json")):
    who = claimed.parsed(path)
    if who is None:
      continue
    here = who["host"] == socket.gethostname()
    if not here or _is_alive(who["process"]):
      found[path.stem] = who
  return found


def _is_alive(process: int) -> bool:
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except PermissionError:  # It is somebody else's.
    return True
  return True


def _progress(workdir: Path, name: str, run: Mapping[str, Any]) -> str:
  """How far the training of a run is."""
  folder = workdir / records.RUNS / name
  steps = [line["step"] for line in metrics.read(folder)]
  if not steps:
    return "begins"
  return f"step {steps[-1]}" + (
    f" of {run['steps']}" if run.get("steps") else ""
  )


def _ahead(
  plan: Mapping[str, Mapping[str, Any]],
  found: Mapping[str, records.Record],
  waiting: Sequence[str],
) -> dict[str, float]:
  """Seconds that the training of each run still takes; empty if nobody knows."""
  done = {
    name: record["seconds"]
    for name, record in found.items()
    if record["status"] == records.DONE and "seconds" in record
  }
  if not done:
    return {}

  def expected(run: Mapping[str, Any]) -> float:
    keys = (
      ("task", "attention", "across"),
      ("task", "attention"),
      ("task",),
      (),
    )
    alike = next(
      seconds
      for names in keys
      if (
        seconds := [
          took
          for other, took in done.items()
          if all(plan[other][name] == run.get(name) for name in names)
        ]
      )
    )
    return statistics.fmean(alike)

  ahead = {}
  for name in waiting:
    record = found.get(name, {})
    match record.get("status"):
      case records.TRAINED:
        ahead[name] = 0.0
      case records.STOPPED:
        spent = record.get("seconds") or 0.0
        ahead[name] = max(0.0, expected(plan[name]) - spent)
      case _:
        ahead[name] = expected(plan[name])
  return ahead


def _left(
  ahead: Mapping[str, float],
  announced: Mapping[str, Mapping[str, Any]],
  written: Mapping[str, float],
) -> str:
  """How long what is left takes.

  Args:
    ahead: identity of a run -> seconds of its training.
    announced: what is known of the runs that processes are at.
    written: identity of a run -> when its record was written.
  """
  if not ahead:
    return "no run is done yet, so nobody knows how long the others take"
  now = time.time()
  seconds = sum(left for name, left in ahead.items() if name not in announced)
  processes: dict[tuple[str, int], list[str]] = {}
  for name, who in announced.items():
    processes.setdefault((who["host"], who["process"]), []).append(name)
  for names in processes.values():
    # In turn, the next run begins where the record of the last is written; side
    # by side, all records are written at the end.
    began = max(
      max(announced[name]["since"], written.get(name, 0.0)) for name in names
    )
    left = sum(ahead.get(name, 0.0) for name in names)
    seconds += max(0.0, left - (now - began))
  at_once = max(1, len(processes))
  minutes = round(seconds / at_once / 60)
  clock = time.strftime("%d %B, %H:%M", time.localtime(now + 60 * minutes))
  return (
    f"about {minutes // 60}:{minutes % 60:02d} hours left with {at_once} at a "
    f"time, until {clock}; measuring not counted"
  )
