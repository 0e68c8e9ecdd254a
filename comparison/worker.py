"""The process that measures: trained runs of one shape, or the time of a step.

    python -m comparison.worker < REQUEST.json

A comparison starts it by `measure` and `time_step`. Runs that differ in seed and
learning rate alone share what is measured of their shape. What it finds it writes
into their records.
"""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
import sys
from typing import Any

from comparison import plan, process, records
from comparison.measurement import measurements
from comparison.plan import Run
from settings.errors import RunError, one_line
from training import experiment
from training.commands import entry
from training.devices.process import keep_freed, keep_programs

_COMMAND = ["-m", "comparison.worker"]


def measure(folder: Path, runs: Mapping[str, bool]) -> str:
  """Measures trained runs of one shape, and completes their records.

  Args:
    folder: of the comparison.
    runs: identity of each -> whether its attention map is kept.

  Returns:
    Why the process failed, on one line; empty if it did not.
  """
  for identity in runs:  # For up to half a minute.
    print(f"  {identity}: measuring time and memory of its program", flush=True)
    break
  ended = process.run(_COMMAND, {"workdir": str(folder), "trained": dict(runs)})
  for identity in runs:
    record = records.of(folder, identity)
    if record.get("status") == records.DONE:
      measured = record["measured"]
      step, seconds = measured["step_seconds"], measured["compile_seconds"]
      text = f"step {1e3 * step:.1f} ms, compiling {seconds:.1f} s"
      print(f"  {identity}: {text}", flush=True)
    elif record.get("reason"):
      reason = record["reason"].removeprefix("measuring: ")
      print(f"  {identity}: not measured: {reason}", flush=True)
  ended.end_with_signal()
  return ended.fault


def time_step(folder: Path, run: Run) -> None:
  """Times a step of a run, from which its budget of seconds becomes steps.

  Raises:
    RunError: it cannot be.
  """
  request = {"workdir": str(folder), "timed": dataclasses.asdict(run)}
  ended = process.run(_COMMAND, request)
  ended.end_with_signal()
  if ended.code:
    raise RunError(ended.error)


def main() -> None:
  """Does what standard input asks for."""
  request = json.load(sys.stdin)
  keep_freed()
  keep_programs()
  work(request)


def work(request: Mapping[str, Any]) -> None:
  """Measures the runs that are 'trained', or a step of the run that is 'timed'."""
  folder, shape = Path(request["workdir"]), None
  for identity, with_map in request.get("trained", {}).items():
    home = folder / records.RUNS / identity
    try:
      shape = measurements.trained(home, with_map=with_map, shape=shape)
    # It stays to be measured, and the others are not stopped.
    except Exception as error:
      reason = f"measuring: {one_line(error)}"
      records.update(folder, identity, reason=reason)
      continue
    records.update(
      folder, identity, status=records.DONE, reason="", measured=shape
    )
  if "timed" in request:
    run = Run(**request["timed"])
    trial = experiment.create(
      plan.config_of(run.task, run.mechanism, run.leaves)
    )
    records.keep_cost(folder, run, measurements.step_cost(trial))


if __name__ == "__main__":
  entry.run(main)
