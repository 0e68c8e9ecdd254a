"""Trains one run of a comparison with `train.py`, and writes its record."""

from collections.abc import Mapping
import datetime
from pathlib import Path
import time
from typing import Any

from comparison import plan, process, records, worker
from comparison.measurement import usage
from comparison.planned_run import Run
from settings import atomic
from settings.errors import one_line
from training import evaluate, metrics, workdir

_ROOT = Path(__file__).parents[1]
_CONFIGS = "--config=configs/"
_INVALID_CONFIG = 2
"""Exit code of train.py for an invalid config, for which a retry is useless."""

_PROGRESS_SECONDS = 10.0
"""Shortest time between two progress lines, in seconds."""

_NOT_METRICS = ("step", "split", "seconds")
"""Names in an evaluation that are not metrics."""


def train(run: Run, folder: Path, share: float | None) -> None:
  """Runs `train.py` with the arguments of a run, and writes its record.

  Args:
    run: a run of the plan.
    folder: the folder of the comparison.
    share: share of the steps after which to evaluate and stop; None trains to the end.
  """
  run_folder, result = records.run_workdir(folder, run), None
  status, reason = "", ""
  used: usage.Usage = {}
  try:
    if records.steps(folder, run) is None:
      worker.time_step(folder, run)
    steps = records.steps(folder, run)
    assert steps is not None
    run_in_steps = run.with_num_steps(steps)
    config = plan.config_of(run.task, run.mechanism, run_in_steps.fields)
    if workdir.final_metrics(run_folder, config) is None:
      result = process.run(
        command(run_in_steps, run_folder, share, steps),
        watch=Progress(run, run_folder, steps),
      )
      used = result.used
      records.check_data(folder, run_folder)
    if workdir.final_metrics(run_folder, config) is not None:
      status = records.TRAINED
    elif result is not None and result.code == _INVALID_CONFIG:
      status, reason = records.FAILED, result.error
    else:
      status, reason = records.STOPPED, "stopped; the same command continues it"
      if result is not None and result.code and result.stop is None:
        reason = result.error
  except ValueError as error:
    status, reason = records.FAILED, one_line(error)
  # After any other error, the run is tried again.
  except Exception as error:
    status, reason = records.STOPPED, one_line(error)
  # A trained run only needs measurements.
  if records.status(folder, run) != records.TRAINED:
    _write(run, folder, used, status=status, reason=reason)
  if result is not None:
    # The process ended immediately.
    if result.stop is not None and result.code > 128:
      print(f"  {result.error}", flush=True)
    result.end_with_signal()


def command(
  run: Run, run_folder: Path, share: float | None, steps: int
) -> list[str]:
  """Returns the arguments of Python: `train.py`, those of the record, and a workdir."""
  config, *fields = run.arguments
  # Outside the checkout, `configs/` needs its full path.
  if Path.cwd() != _ROOT:
    config = config.replace(_CONFIGS, f"--config={_ROOT}/configs/", 1)
  arguments = [
    str(_ROOT / "train.py"),
    config,
    *fields,
    f"--workdir={run_folder}",
  ]
  if share is not None:
    arguments.append(f"--stop_at={records.step_at(steps, share)}")
  return arguments


class Progress:
  """Prints the progress of a run from its metrics.jsonl, and the time left."""

  def __init__(self, run: Run, run_folder: Path, steps: int):
    self._run, self._run_folder, self._steps = run, run_folder, steps
    self._due, self._last_step = time.monotonic() + _PROGRESS_SECONDS, 0

  def __call__(self) -> None:
    """Prints the last training metrics, if a line is due."""
    if time.monotonic() < self._due:
      return
    self._due = time.monotonic() + _PROGRESS_SECONDS
    lines = [x for x in metrics.read(self._run_folder) if x["split"] == "train"]
    if lines and lines[-1]["step"] > self._last_step:
      values = lines[-1]
      step, seconds = values["step"], values["seconds"]
      self._last_step = step
      left = datetime.timedelta(
        seconds=round(seconds / step * (self._steps - step))
      )
      numbers = {k: v for k, v in values.items() if k not in _NOT_METRICS}
      text = f"step {step}/{self._steps}  {metrics.format_values(numbers)}"
      print(f"  {self._run.identity}: {text}  {left} left", flush=True)


def _write(
  run: Run, folder: Path, used: usage.Usage, *, status: str, **ending: Any
) -> None:
  """Writes the record of a run that has ended."""
  steps = records.steps(folder, run)
  arguments = run.with_num_steps(steps).arguments if steps else run.arguments
  earlier = records.usage(folder, run)
  usages = {**earlier, **_sum(earlier, used)}
  fields = {**ending, **usages, "arguments": arguments}
  if status == records.FAILED:
    print(f"  {run.identity}: failed: {ending['reason']}", flush=True)
  if status == records.TRAINED:
    run_folder = records.run_workdir(folder, run)
    outcome = _outcome(run_folder)
    machine = usage.machine() | {"device": workdir.device(run_folder)}
    fields |= {**outcome, "machine": machine, "measured": {}}
    # Choosing runs are not reported, so their cost is not measured.
    status = records.DONE if run.choosing else records.TRAINED
    numbers = {
      k: v for k, v in outcome["final"].items() if k not in _NOT_METRICS
    }
    print(f"  {run.identity}: {metrics.format_values(numbers)}", flush=True)
  records.write(folder, run, status=status, **fields)


def _outcome(run_folder: Path) -> dict[str, Any]:
  """Reads the results of a run from its workdir, for its record.

  'final' is the last evaluation, and 'history' has all lines. If the task's metric is
  BLEU, 'sentences' has ten numbers for each sentence of the last split.
  """
  history = metrics.read(run_folder)
  final = [line for line in history if line["split"] != "train"][-1]
  outcome = {"final": final, "history": history}
  sentences = atomic.read_json(run_folder / evaluate.SENTENCES)
  return outcome | ({"sentences": sentences["statistics"]} if sentences else {})


def _sum(earlier: Mapping[str, float | None], used: usage.Usage) -> usage.Usage:
  """Combines the usage of a run's processes: sums of times, maxima of the rest."""
  total = dict(used)
  for name, value in earlier.items():
    if value is not None and name in used:
      reduction = sum if name.endswith("seconds") else max
      total[name] = reduction((value, used[name]))
  return total
