"""The process that trains and measures runs of one shape, one after another.

    python -m comparison.worker < REQUEST.json

A comparison starts it by `run`. Runs that differ in seed and learning rate alone
compile the same step, which JAX keeps on disk, and share what is measured of their
shape. Their records are written here; what is printed is for a person.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import io
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from comparison import plan, records
from comparison.measurement import measurements, usage
from comparison.plan import Run
from settings.errors import one_line
from training import atomic, evaluate, experiment, loop, metrics, workdir
from training.commands import entry
from training.devices import process
from training.experiment import Experiment
from training.signals import Signals

Shape = Mapping[str, Any] | None
Say = Callable[[str, str], None]
"""Prints the identity of a run and what became of it."""

_COMMAND = ["-m", "comparison.worker"]

_STOPPING = (
  "stopping: a step that runs is finished and saved; run it again to continue"
)

_MEASURING = "stopped while it was measured; run it again to continue"

_QUIET_SECONDS = 10.0
"""A run that trains says where it is as often, at most."""

_PLACE = ("step", "split", "seconds")
"""Names in the final evaluation that say when it was made; the others are metrics."""


def run(request: Mapping[str, Any]) -> str:
  """Runs this module in a process of its own to its end, and prints what it says.

  SIGTERM and SIGINT stop it, which saves itself, and then this process; that they
  came is said at once.

  Args:
    request: JSON-ready, its standard input.

  Returns:
    Why it failed, on one line; empty where it did not.
  """
  with (
    tempfile.TemporaryFile("w+", encoding="utf-8") as inputs,
    tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
  ):
    json.dump(request, inputs)
    inputs.seek(0)
    with (
      subprocess.Popen(
        [sys.executable, *_COMMAND],
        stdin=inputs,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
        # Whatever the locale, it says what this process reads.
        env=os.environ | {"PYTHONIOENCODING": "utf-8:replace"},
      ) as process,
      Signals(functools.partial(_stop, process)) as signals,
    ):
      try:
        assert process.stdout is not None
        # Where a notebook shows it, too.
        for line in process.stdout:
          print(line, end="", flush=True)
        process.wait()
      except BaseException:
        process.terminate()
        raise
    errors.seek(0)
    # The last line of a traceback says what went wrong.
    *_, last = errors.read().strip().splitlines() or ["no message"]
    if signals.stop:
      if process.returncode > 128:  # What it said when it ended at once.
        print(f"  {last}", flush=True)
      if signals.stop == signal.SIGINT:
        raise KeyboardInterrupt
      sys.exit(128 + signals.stop)
    if not process.returncode:
      return ""
    return f"exit code {process.returncode}: {one_line(RuntimeError(last))}"


def _stop(process: subprocess.Popen[str]) -> None:
  """Says at once that a signal came, and hands it on."""
  print(_STOPPING, flush=True)
  process.terminate()


def main() -> None:
  """Does what standard input asks for."""
  request, out = json.load(sys.stdin), sys.stdout

  def say(identity: str, text: str) -> None:
    print(f"  {identity}: {text}", file=out, flush=True)

  process.keep_freed()
  process.keep_programs()
  # A run says a lot that nobody reads here, but for its `Steps`.
  with (
    Path(os.devnull).open("w", encoding="utf-8") as sink,
    contextlib.redirect_stdout(sink),
    Signals() as signals,
  ):
    work(request, signals, say)


class Steps(io.TextIOBase):
  """What is printed of a run's steps, with the time left, now and then.

  Args:
    say: takes a line.
  """

  def __init__(self, say: Callable[[str], None]):
    self._say, self._due = say, time.monotonic() + _QUIET_SECONDS

  def write(self, text: str) -> int:
    """Passes a line of `training.metrics.Progress` on where one is due."""
    is_step = text.startswith("step ") and text.endswith(" left")
    if is_step and time.monotonic() >= self._due:
      self._say(text)
      self._due = time.monotonic() + _QUIET_SECONDS
    return len(text)


def work(request: Mapping[str, Any], signals: Signals, say: Say) -> None:
  """Trains the 'runs' of a request, and measures those that are 'trained'."""
  folder = Path(request["workdir"])
  if runs := request.get("runs"):
    runs = [Run(**run) for run in runs]
    train(runs, folder, request["share"], request["map_seed"], signals, say)
  shape = None
  signals.abandon = _MEASURING
  for identity, with_map in request.get("trained", {}).items():
    shape = measure(identity, folder, with_map, shape, say)


def train(
  runs: Sequence[Run],
  folder: Path,
  share: float | None,
  map_seed: int,
  signals: Signals,
  say: Say,
) -> None:
  """Trains and measures one run after another, until `signals.stop`.

  Args:
    runs: of one shape.
    folder: of the comparison.
    share: of the steps, where runs are evaluated and stop; None goes to the end.
    map_seed: of the runs whose attention maps are kept, all of one example.
    signals: entered.
    say: told as each ends.
  """
  shape = None
  for run in runs:
    home, meter = records.home(folder, run), usage.Meter()
    signals.abandon = loop.before_a_step(home)
    trial, status, reason = None, records.TRAINED, ""
    try:
      steps = _steps(run, folder)
      stop_at = None if share is None else records.step_at(steps, share)
      meter = usage.Meter()  # To time a step is not to train.
      trial = begin(run.with_num_steps(steps), home)
      # A file may be replaced while other runs train.
      records.check_data(folder, home)
      spoken = Steps(functools.partial(say, run.identity))
      with contextlib.redirect_stdout(spoken):
        results = loop.run(trial, home, stop_at, signals) if trial else {}
      if results is None:
        status = records.STOPPED
        reason = "stopped; the same command continues it"
    except ValueError as error:  # Another try would end alike.
      status, reason = records.FAILED, one_line(error)
    except Exception as error:
      status, reason = records.STOPPED, one_line(error)
    # A run may have been trained before, and is to be measured.
    if records.status(folder, run) != records.TRAINED:
      used = {} if trial is None else meter.read()
      _write(
        run, folder, used, say, status=status, reason=reason, together=len(runs)
      )
    if signals.stop and status == records.STOPPED:
      say(run.identity, loop.before_a_step(home))
      return
    if status == records.TRAINED and not run.choosing:
      signals.abandon = _MEASURING
      with_map = run.seed == map_seed
      shape = measure(run.identity, folder, with_map, shape, say)


def begin(run: Run, home: Path) -> Experiment | None:
  """Makes a run in its folder.

  Returns:
    Everything of it; None where it is trained already.

  Raises:
    ConfigError: it cannot be.
  """
  config = plan.config_of(run.task, run.mechanism, run.leaves)
  workdir.check(home, config)
  if workdir.final_metrics(home, config) is not None:
    return None
  return experiment.begin(config, home)


def measure(
  identity: str, folder: Path, with_map: bool, shape: Shape, say: Say
) -> Shape:
  """Measures a trained run, and completes its record.

  What was measured of another run of its `shape` is not measured again.

  Returns:
    What was measured; `shape` where nothing can be.
  """
  home = folder / records.RUNS / identity
  if shape is None:  # For up to half a minute.
    say(identity, "measuring time and memory of its program")
  try:
    results = measurements.trained(home, with_map=with_map, shape=shape)
  # It stays to be measured, and the others are not stopped.
  except Exception as error:
    reason = one_line(error)
    records.update(folder, identity, reason=f"measuring: {reason}")
    say(identity, f"not measured: {reason}")
    return shape
  records.update(
    folder, identity, status=records.DONE, reason="", measured=results
  )
  step, compiling = 1e3 * results["step_seconds"], results["compile_seconds"]
  say(identity, f"step {step:.1f} ms, compiling {compiling:.1f} s")
  return results


def _steps(run: Run, folder: Path) -> int:
  """Steps of a run; a budget of seconds is timed once for all seeds.

  Raises:
    ConfigError: it cannot be.
  """
  steps = records.steps(folder, run)
  if steps is not None:
    return steps
  trial = experiment.create(plan.config_of(run.task, run.mechanism, run.leaves))
  records.keep_cost(folder, run, measurements.step_cost(trial))
  return _steps(run, folder)


def _write(
  run: Run,
  folder: Path,
  used: usage.Usage,
  say: Say,
  *,
  status: str,
  **ending: Any,
) -> None:
  """Writes the record of a run that has ended."""
  steps = records.steps(folder, run)
  arguments = run.with_num_steps(steps).arguments if steps else run.arguments
  spent = records.usage(folder, run)
  fields = {**ending, **spent, **_sum(spent, used), "arguments": arguments}
  if status == records.FAILED:
    say(run.identity, f"failed: {ending['reason']}")
  if status == records.TRAINED:
    outcome = _outcome(records.home(folder, run))
    fields |= {**outcome, "machine": usage.machine(), "measured": {}}
    # What chooses is not reported, so its cost is not measured.
    status = records.DONE if run.choosing else records.TRAINED
    numbers = {k: v for k, v in outcome["final"].items() if k not in _PLACE}
    say(run.identity, metrics.format_values(numbers))
  records.write(folder, run, status=status, **fields)


def _outcome(home: Path) -> dict[str, Any]:
  """What a run left in its folder for its record.

  'final' is the last evaluation, 'history' all lines. 'sentences' has ten
  numbers for each sentence of the last split, where the task is judged by BLEU.
  """
  history = metrics.read(home)
  final = [line for line in history if line["split"] != "train"][-1]
  outcome = {"final": final, "history": history}
  sentences = atomic.read_json(home / evaluate.SENTENCES)
  return outcome | ({"sentences": sentences["statistics"]} if sentences else {})


def _sum(spent: Mapping[str, float | None], used: usage.Usage) -> usage.Usage:
  """What several processes of a run took: seconds add up, all else is the most."""
  total = dict(used)
  for name, value in spent.items():
    if value is not None and name in used:
      reduction = sum if name.endswith("seconds") else max
      total[name] = reduction((value, used[name]))
  return total


if __name__ == "__main__":
  entry.run(main)
