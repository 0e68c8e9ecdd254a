"""A process that measures trained runs of one shape, or times a step.

    python -m comparison.worker < REQUEST.json

`measure` and `time_step` start the process, which writes the results into the records
of the runs. Runs that differ only in seed and learning rate share the measurements of
their shape.
"""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
import sys
from typing import Any

from comparison import plan, process, records
from comparison.measurement import measurements
from comparison.planned_run import Run
from settings.errors import RunError, one_line
from training import experiment
from training.commands import entry
from training.devices.process import cache_programs, keep_freed_memory

_COMMAND = ["-m", "comparison.worker"]


def measure(folder: Path, runs: Mapping[str, bool]) -> str:
  """Measures trained runs of one shape, and completes their records.

  Args:
    folder: the folder of the comparison.
    runs: maps the identity of each run to whether its attention map is stored.

  Returns:
    The error of the process, on one line; empty if it did not fail.
  """
  first = next(iter(runs))
  # This takes up to half a minute.
  print(f"  {first}: measuring time and memory of its program", flush=True)
  result = process.run(
    _COMMAND, {"workdir": str(folder), "trained": dict(runs)}
  )
  for identity in runs:
    record = records.read_one(folder, identity)
    if record.get("status") == records.DONE:
      measured = record["measured"]
      step, seconds = measured["step_seconds"], measured["compile_seconds"]
      text = f"step {1e3 * step:.1f} ms, compiling {seconds:.1f} s"
      print(f"  {identity}: {text}", flush=True)
    elif record.get("reason"):
      reason = record["reason"].removeprefix("measuring: ")
      print(f"  {identity}: not measured: {reason}", flush=True)
  result.end_with_signal()
  return result.fault


def time_step(folder: Path, run: Run) -> None:
  """Times a step of a run, to convert its budget of seconds to steps.

  Raises:
    RunError: the process failed.
  """
  request = {"workdir": str(folder), "timed": dataclasses.asdict(run)}
  result = process.run(_COMMAND, request)
  result.end_with_signal()
  if result.code:
    raise RunError(result.error)


def main() -> None:
  """Handles the request on standard input."""
  request = json.load(sys.stdin)
  keep_freed_memory()
  cache_programs()
  work(request)


def work(request: Mapping[str, Any]) -> None:
  """Measures the runs in 'trained', or times a step of the run in 'timed'."""
  folder, shape = Path(request["workdir"]), None
  for identity, with_map in request.get("trained", {}).items():
    run_folder = folder / records.RUNS / identity
    try:
      shape = measurements.measure_trained(
        run_folder, with_map=with_map, shape=shape
      )
    # The run can be measured later, so the others continue.
    except Exception as error:
      reason = f"measuring: {one_line(error)}"
      records.update(folder, identity, reason=reason)
      continue
    records.update(
      folder, identity, status=records.DONE, reason="", measured=shape
    )
  if "timed" in request:
    run = Run(**request["timed"])
    config = plan.config_of(run.task, run.mechanism, run.fields)
    cost = measurements.step_cost(experiment.create(config))
    records.store_step_cost(folder, run, cost)


if __name__ == "__main__":
  entry.run(main)
