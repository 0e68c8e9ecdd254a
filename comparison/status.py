"""What a comparison has done, what it does, and when it will be done."""

from collections.abc import Mapping, Sequence
import os
from pathlib import Path
import socket
import statistics
import time
from typing import Any

from comparison import records
from process import claimed
from training import metrics


def text(workdir: Path) -> str:
  """Lines for a person: counts, what runs, what failed, and the time left.

  A run takes as long as those of its mechanism and task that are done, or as those
  of its task, or as all; what runs now has a part of that behind it.

  Args:
    workdir: of the comparison.
  """
  plan = records.planned(workdir)
  found = {path.stem: record for path, record in records.by_path(workdir)}
  names = ("task", "attention")
  known = {
    name: {key: record[key] for key in names} for name, record in found.items()
  }
  plan = {**known, **plan}
  running = _running(workdir)
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
    lines.append(_left(plan, found, waiting, running))
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


def _left(
  plan: Mapping[str, Mapping[str, Any]],
  found: Mapping[str, records.Record],
  waiting: Sequence[str],
  running: Mapping[str, Mapping[str, Any]],
) -> str:
  """How long what is left takes."""
  done = [
    record
    for record in found.values()
    if record["status"] == records.DONE and "seconds" in record
  ]
  if not done:
    return "no run is done yet, so nobody knows how long the others take"

  def expected(run: Mapping[str, Any]) -> float:
    keys = (("task", "attention"), ("task",), ())
    alike = next(
      found
      for names in keys
      if (
        found := [
          record["seconds"]
          for record in done
          if all(record[name] == run.get(name) for name in names)
        ]
      )
    )
    return statistics.fmean(alike)

  now = time.time()
  seconds = 0.0
  for name in waiting:
    left = expected(plan[name])
    if name in running:
      left = max(0.0, left - (now - running[name]["since"]))
    seconds += left
  at_once = max(1, len(running))
  minutes = round(seconds / at_once / 60)
  clock = time.strftime("%d %B, %H:%M", time.localtime(now + 60 * minutes))
  return (
    f"about {minutes // 60}:{minutes % 60:02d} hours left with {at_once} at a "
    f"time, until {clock}; measuring not counted"
  )
