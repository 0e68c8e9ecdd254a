"""What a comparison has found so far: one small file a run."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import socket
import time
from typing import Any

from comparison.plan import Run
from training import claimed, metrics

COMPARISON = "comparison.json"
PLAN, REFERENCES = "plan.json", "references.json"
RUNS, RECORDS, RUNNING = "runs", "records", "running"
SCALING = "scaling.jsonl"
DONE, FAILED, UNSUPPORTED = "done", "failed", "not supported"
TRAINED, STOPPED = "not measured yet", "stopped"
STOPPED_EARLY = "stopped early"
"""Successive halving stopped it; it is not continued."""

Record = Mapping[str, Any]
"""What `write` wrote: the run, its status, what it measured."""


def check(workdir: Path, what: Mapping[str, Any]) -> None:
  """Checks that `workdir` is free, or that of this very comparison.

  Mechanisms and seeds may be added later; what all runs share may not change.

  Args:
    workdir: of the comparison.
    what: what all of its runs share, JSON-ready.

  Raises:
    ConfigError: it belongs to another comparison, or holds other files.
  """
  claimed.check(workdir, COMPARISON, what, "comparison", "config.")


def claim(workdir: Path, what: Mapping[str, Any]) -> None:
  """Makes `workdir` that of this comparison, or checks that it is: `check`."""
  check(workdir, what)
  claimed.claim(workdir, COMPARISON, what)


def write(workdir: Path, run: Run, *, status: str, **found: Any) -> None:
  """Writes the record of one run, whole or not at all.

  Args:
    workdir: of the comparison.
    run: whose record it is.
    status: 'done', or what became of it.
    **found: what is known beyond the plan; takes its place.
  """
  folder = workdir / RECORDS
  folder.mkdir(exist_ok=True)
  record = {
    "task": run.task,
    "attention": run.attention,
    "slots": run.slots,
    "options": run.options,
    "learning_rate": run.learning_rate,
    "seed": run.seed,
    "grid": run.grid,
    "across": run.across,
    "length": run.length,
    "status": status,
    "reason": run.obstacle,
    "parameters": run.parameters,
    "unmatched_parameters": run.unmatched_parameters,
    "arguments": run.arguments,
    **found,
  }
  claimed.replace(_path(workdir, run), record)


def update(workdir: Path, run: Run, **found: Any) -> None:
  """Adds to the record that is there."""
  claimed.replace(_path(workdir, run), {**_known(workdir, run), **found})


def read(workdir: Path) -> tuple[list[Record], list[str]]:
  """All records, and the names of files that are none.

  A damaged file counts as a run that was never made: it is run again.
  """
  paths = sorted((workdir / RECORDS).glob("*.json"))
  whole = by_path(workdir)
  damaged = {path.name for path in paths} - {path.name for path, _ in whole}
  return [record for _, record in whole], sorted(damaged)


def by_path(workdir: Path) -> list[tuple[Path, Record]]:
  """The records that are whole, and where they lie."""
  found = []
  for path in sorted((workdir / RECORDS).glob("*.json")):
    record = _whole(path)
    if record is not None:
      found.append((path, record))
  return found


def plan(workdir: Path, runs: Sequence[Run]) -> None:
  """Adds runs to those that the comparison is known to have."""
  known = claimed.parsed(workdir / PLAN) or {}
  found = {
    run.identity: {
      "task": run.task,
      "attention": run.attention,
      "across": run.across,
      "steps": run.steps,
    }
    for run in runs
  }
  claimed.replace(workdir / PLAN, {**known, **found})


def planned(workdir: Path) -> dict[str, dict[str, Any]]:
  """Identity of every run that `plan` was told of -> what it is."""
  return claimed.parsed(workdir / PLAN) or {}


def refer(workdir: Path, references: Mapping[str, Any]) -> None:
  """Keeps results from elsewhere, task -> name -> metric -> value."""
  path = workdir / REFERENCES
  if references:
    # A config's mappings are read-only ones, which JSON does not know.
    content = {
      task: {name: dict(values) for name, values in of_task.items()}
      for task, of_task in references.items()
    }
    claimed.replace(path, content)
  else:
    path.unlink(missing_ok=True)


def references(workdir: Path) -> dict[str, dict[str, dict[str, float]]]:
  """What `refer` kept; empty where there is nothing."""
  return claimed.parsed(workdir / REFERENCES) or {}


@contextlib.contextmanager
def running(workdir: Path, run: Run) -> Iterator[None]:
  """Says meanwhile that a run is being made, by which process."""
  folder = workdir / RUNNING
  folder.mkdir(exist_ok=True)
  path = folder / f"{run.identity}.json"
  who = {"host": socket.gethostname(), "process": os.getpid()}
  claimed.replace(path, {**who, "since": time.time()})
  try:
    yield
  finally:
    path.unlink(missing_ok=True)


def scaling(workdir: Path) -> list[dict[str, Any]] | None:
  """What `benchmarks.scaling` has written so far; None where it has not."""
  path = workdir / SCALING
  if not path.exists():
    return None
  rows = []
  for line in path.read_text().splitlines():
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError:  # It may still be writing.
      break
  return rows


def history(workdir: Path, run: Run) -> list[dict[str, Any]]:
  """Lines of a run's metrics.jsonl: of its record, or of its folder."""
  kept = _known(workdir, run).get("history")
  return kept or metrics.read(workdir / RUNS / run.identity)


def status(workdir: Path, run: Run) -> str | None:
  """Status of a run's record; None where there is none, or a damaged one."""
  return _known(workdir, run).get("status")


def usage(workdir: Path, run: Run) -> dict[str, float | None]:
  """What a run that was stopped has taken so far; empty for any other."""
  record = _known(workdir, run)
  if record.get("status") != STOPPED:
    return {}
  names = ("seconds", "cpu_seconds", "peak_bytes", "others_cores")
  return {name: record.get(name) for name in names}


def _known(workdir: Path, run: Run) -> Record:
  return _whole(_path(workdir, run)) or {}


def _whole(path: Path) -> Record | None:
  record = claimed.parsed(path)
  return record if record and {"task", "status"} <= record.keys() else None


def _path(workdir: Path, run: Run) -> Path:
  return workdir / RECORDS / f"{run.identity}.json"
