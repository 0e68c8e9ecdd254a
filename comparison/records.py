"""The records of a comparison: one small file per run."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import socket
from typing import Any

from comparison.planned_run import Run
from settings import atomic
from settings.errors import ConfigError
from tasks import files
from training import metrics, ownership

COMPARISON = "comparison.json"
PLAN, REFERENCES = "plan.json", "references.json"
RUNS, RECORDS, RUNNING, BUDGETS = "runs", "records", "running", "budgets"
SCALING = "scaling.jsonl"
DONE, FAILED, UNSUPPORTED = "done", "failed", "not supported"
TRAINED, STOPPED = "not measured yet", "stopped"
OPEN = "open"
"""Key of a planned run whose grid point is not chosen yet."""
ADDED = "added"
"""Key of a planned run whose seed was not in the first plan."""
STOPPED_EARLY = "stopped early"
"""Status of a run that successive halving stopped; the run is not continued."""

_PLAN_FIELDS = ("task", "attention", "across", "row", "seed", "choosing")
_RUN_FIELDS = (
  *_PLAN_FIELDS,
  "width",
  "grid",
  "at_edge",
  "learning_rate",
  "slots",
)
_RUN_FIELDS += ("options", "length", "solved_at", "arguments", "parameters")
_RUN_FIELDS += ("unmatched_parameters", "dense_parameters", "feed_forward")
_RUN_FIELDS += ("dense_feed_forward",)

Record = Mapping[str, Any]
"""A record that `write` wrote: the run, its status and its measurements."""


def check(workdir: Path, shared: Mapping[str, Any]) -> None:
  """Checks that `workdir` is unused, or belongs to this comparison.

  Mechanisms and seeds may be added later, but the settings that all runs share,
  `shared_settings`, may not change.

  Raises:
    ConfigError: the folder belongs to another comparison, or has other files.
  """
  ownership.check(workdir, COMPARISON, shared, "comparison", "config.")


def shared_settings(workdir: Path) -> dict[str, Any]:
  """Returns the settings that all runs of a comparison share; empty without one."""
  return atomic.read_json(workdir / COMPARISON) or {}


def check_data(workdir: Path, run_folder: Path) -> None:
  """Checks that a run reads the same data as the comparison did at its start.

  Args:
    workdir: the folder of the comparison.
    run_folder: the workdir of a run that has started.

  Raises:
    ConfigError: a file has changed since then.
  """
  data = shared_settings(workdir).get(ownership.DATA, {})
  for name, digest in files.recorded_data(run_folder).items():
    if data.get(name, digest) != digest:
      raise ConfigError(
        f"config.task: {name} has changed since the comparison in {workdir} began; "
        "restore it or choose a new folder"
      )


def claim(workdir: Path, shared: Mapping[str, Any]) -> None:
  """Claims `workdir` for this comparison, after `check`."""
  check(workdir, shared)
  ownership.claim(workdir, COMPARISON, shared)


def write(workdir: Path, run: Run, *, status: str, **fields: Any) -> None:
  """Writes the record of one run, atomically.

  `fields` replace the values from the plan.
  """
  (workdir / RECORDS).mkdir(exist_ok=True)
  record = {
    **{name: getattr(run, name) for name in _RUN_FIELDS},
    "status": status,
    "reason": run.obstacle,
    **fields,
  }
  atomic.write_json(_path(workdir, run.identity), record)


def update(workdir: Path, identity: str, **fields: Any) -> None:
  """Updates fields of the existing record of a run."""
  atomic.write_json(
    _path(workdir, identity), read_one(workdir, identity) | fields
  )


def read(workdir: Path) -> tuple[list[Record], list[str]]:
  """Reads all records, and lists the names of damaged files.

  A run with a damaged record is not started, and is run again.
  """
  records = by_identity(workdir)
  paths = sorted((workdir / RECORDS).glob("*.json"))
  return list(records.values()), [
    x.name for x in paths if x.stem not in records
  ]


def by_identity(workdir: Path) -> dict[str, dict[str, Any]]:
  """Maps the identities of runs to their records, without damaged records."""
  names = (path.stem for path in sorted((workdir / RECORDS).glob("*.json")))
  return {name: record for name in names if (record := read_one(workdir, name))}


def read_one(workdir: Path, identity: str) -> dict[str, Any]:
  """Returns the record of a run; empty if it is missing or damaged."""
  record = atomic.read_json(_path(workdir, identity)) or {}
  return record if {"task", "status"} <= record.keys() else {}


def forget_failure(workdir: Path, run: Run) -> None:
  """Removes the record of a failed run or measurement, so that it is tried again."""
  if status(workdir, run) == FAILED:
    _path(workdir, run.identity).unlink()
  elif status(workdir, run) == TRAINED:
    update(workdir, run.identity, reason="")


def plan(workdir: Path, runs: Sequence[Run], seeds: Sequence[int] = ()) -> None:
  """Adds runs to the plan of the comparison.

  If they choose a grid point, `seeds` are the seeds of the reported runs at that point.
  Runs with seeds that are not in the plan yet are marked, because earlier results may
  have motivated them.
  """
  entries = {}
  for run in runs:
    fields = {name: getattr(run, name) for name in (*_PLAN_FIELDS, "steps")}
    entries[run.identity] = fields
    for seed in seeds:
      open_fields = {"seed": seed, "choosing": False, OPEN: True}
      entries[f"{run.row}, seed {seed}"] = fields | open_fields
  # Another shard may add its runs at the same time.
  with ownership.lock(workdir, wait=True):
    planned = planned_runs(workdir)
    earlier = [*by_identity(workdir).values(), *planned.values()]
    first_seeds = {
      run["seed"]
      for run in earlier
      if not run.get("choosing") and not run.get(ADDED)
    }
    for entry in entries.values():
      if first_seeds and not entry["choosing"]:
        entry |= {ADDED: True} if entry["seed"] not in first_seeds else {}
    store_plan(workdir, planned | entries)


def store_plan(workdir: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
  """Replaces the stored plan."""
  atomic.write_json(workdir / PLAN, entries)


def retry_unsupported(workdir: Path, runs: Sequence[Run]) -> None:
  """Removes the records of runs that could not run before but can run now.

  Raises:
    ConfigError: earlier runs of one of the rows have other settings.
  """
  candidates = {
    (run.row, _point(run.grid)): run for run in runs if not run.obstacle
  }
  for identity, record in by_identity(workdir).items():
    run = candidates.get((str(record.get("row")), _point(record.get("grid"))))
    if run is None:
      continue
    if record["status"] == UNSUPPORTED:
      with ownership.lock(workdir, wait=True):
        # Another shard may have removed it.
        _path(workdir, identity).unlink(missing_ok=True)
        entries = planned_runs(workdir)
        entries.pop(identity, None)
        store_plan(workdir, entries)
      continue
    recorded, planned = map(_settings, (record["arguments"], run.arguments))
    if recorded != planned:
      raise ConfigError(
        f"workdir: {workdir} has runs of {run.row} with "
        f"{' '.join(sorted(recorded - planned)) or 'no more settings'}, got "
        f"{' '.join(sorted(planned - recorded)) or 'none'}; choose another name for the "
        "variant, or a new folder"
      )


def _point(grid: Any) -> str:
  return json.dumps(grid, sort_keys=True)


def _settings(arguments: Sequence[str]) -> set[str]:
  """Returns the arguments without the seed, and without the steps of a budget."""
  varying = ("--config.seed=", "--config.num_steps=")
  return {x for x in arguments if not x.startswith(varying)}


def planned_runs(workdir: Path) -> dict[str, dict[str, Any]]:
  """Maps the identities of all planned runs to their descriptions."""
  return atomic.read_json(workdir / PLAN) or {}


def write_references(workdir: Path, references: Mapping[str, Any]) -> None:
  """Stores results of other sources, as task -> name -> metric -> value."""
  # A config's mappings are read-only types, which JSON does not support.
  content = json.loads(json.dumps(references, default=dict))
  atomic.write_json(workdir / REFERENCES, content)


def read_references(workdir: Path) -> dict[str, dict[str, dict[str, float]]]:
  """Returns the results that `write_references` stored; empty if there are none."""
  return atomic.read_json(workdir / REFERENCES) or {}


@contextlib.contextmanager
def running(workdir: Path, run: Run) -> Iterator[None]:
  """Returns a context manager that marks a run as running in this process."""
  (workdir / RUNNING).mkdir(exist_ok=True)
  path = workdir / RUNNING / f"{run.identity}.json"
  atomic.write_json(
    path, {"host": socket.gethostname(), "process": os.getpid()}
  )
  try:
    yield
  finally:
    path.unlink(missing_ok=True)


def run_workdir(workdir: Path, run: Run) -> Path:
  """Returns the workdir of a run, as `train.py` uses it."""
  return workdir / RUNS / run.identity


def history(workdir: Path, run: Run) -> list[dict[str, Any]]:
  """Returns the lines of a run's metrics.jsonl, from its record or its workdir."""
  lines = read_one(workdir, run.identity).get("history")
  return lines or metrics.read(run_workdir(workdir, run))


def evaluations(workdir: Path, run: Run) -> dict[int, dict[str, Any]]:
  """Maps steps to the metrics on the first held-out split, for all steps so far."""
  lines = [x for x in history(workdir, run) if x["split"] != "train"]
  return {
    line["step"]: line for line in lines if line["split"] == lines[0]["split"]
  }


def loss_at(workdir: Path, run: Run, share: float) -> float | None:
  """Returns the held-out loss after a share of the steps; None if not reached yet.

  If the run ended before, this is the last loss.
  """
  count = steps(workdir, run)
  if count is None:
    return None
  step, lines = step_at(count, share), evaluations(workdir, run)
  if lines and status(workdir, run) == DONE:
    step = min(step, max(lines))
  line = lines.get(step)
  return None if line is None else line["loss"]


def step_at(count: int, share: float) -> int:
  """Returns the step at which a share of all steps ends."""
  return max(1, round(share * count))


def steps(workdir: Path, run: Run) -> int | None:
  """Returns the steps of a run; None if its budget is seconds and no step is timed."""
  if run.budget_seconds is None:
    return run.steps
  cost = step_cost(workdir, run)
  if cost is None:
    return None
  return max(1, round(run.budget_seconds / cost["step_seconds"]))


def step_cost(workdir: Path, run: Run) -> dict[str, Any] | None:
  """Returns the cost of a step that `store_step_cost` stored; None if there is none."""
  return atomic.read_json(workdir / BUDGETS / f"{run.family}.json")


def store_step_cost(workdir: Path, run: Run, cost: Mapping[str, Any]) -> None:
  """Stores the cost of a step, for `steps` and for estimates of the time."""
  (workdir / BUDGETS).mkdir(exist_ok=True)
  atomic.write_json(workdir / BUDGETS / f"{run.family}.json", cost)


def status(workdir: Path, run: Run) -> str | None:
  """Returns the status in a run's record; None if it is missing or damaged."""
  return read_one(workdir, run.identity).get("status")


def usage(workdir: Path, run: Run) -> dict[str, float | None]:
  """Returns the time and memory used by a stopped run; empty for any other."""
  record = read_one(workdir, run.identity)
  if record.get("status") != STOPPED:
    return {}
  names = ("seconds", "cpu_seconds", "peak_bytes", "others_cores")
  return {name: record.get(name) for name in names}


def _path(workdir: Path, identity: str) -> Path:
  return workdir / RECORDS / f"{identity}.json"
