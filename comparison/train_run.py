"""Trains one run of a comparison with `train.py`, and writes its record."""

from collections.abc import Mapping
import datetime
from pathlib import Path
import time
from typing import Any

from comparison import plan, process, records, worker
from comparison.measurement import usage
from comparison.plan import Run
from settings.errors import one_line
from training import atomic, evaluate, metrics, workdir

_ROOT = Path(__file__).parents[1]
_CONFIGS = "--config=configs/"
_REFUSED = 2
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
  home, ended, status, reason = records.run_workdir(folder, run), None, "", ""
  used: usage.Usage = {}
  try:
    if records.steps(folder, run) is None:
      worker.time_step(folder, run)
    steps = records.steps(folder, run)
    assert steps is not None
    timed = run.with_num_steps(steps)
    config = plan.config_of(run.task, run.mechanism, timed.fields)
    if workdir.final_metrics(home, config) is None:
      ended = process.run(
        command(timed, home, share, steps), watch=Progress(run, home, steps)
      )
      used = ended.used
      records.check_data(folder, home)
    if workdir.final_metrics(home, config) is not None:
      status = records.TRAINED
    elif ended is not None and ended.code == _REFUSED:
      status, reason = records.FAILED, ended.error
    else:
      status, reason = records.STOPPED, "stopped; the same command continues it"
      if ended is not None and ended.code and ended.stop is None:
        reason = ended.error
  except ValueError as error:
    status, reason = records.FAILED, one_line(error)
  # The run is tried again.
  except Exception as error:
    status, reason = records.STOPPED, one_line(error)
  # A run that is already trained only needs measurements.
  if records.status(folder, run) != records.TRAINED:
    _write(run, folder, used, status=status, reason=reason)
  if ended is not None:
    if ended.stop is not None and ended.code > 128:  # It ended immediately.
      print(f"  {ended.error}", flush=True)
    ended.end_with_signal()


def command(run: Run, home: Path, share: float | None, steps: int) -> list[str]:
  """Returns the arguments of Python: `train.py`, those of the record, and a workdir."""
  config, *fields = run.arguments
  # Outside the checkout, `configs/` needs its full path.
  if Path.cwd() != _ROOT:
    config = config.replace(_CONFIGS, f"--config={_ROOT}/configs/", 1)
  arguments = [str(_ROOT / "train.py"), config, *fields, f"--workdir={home}"]
  if share is not None:
    arguments.append(f"--stop_at={records.step_at(steps, share)}")
  return arguments


class Progress:
  """Prints the progress of a run from its metrics.jsonl, and the time left."""

  def __init__(self, run: Run, home: Path, steps: int):
    self._run, self._home, self._steps = run, home, steps
    self._due, self._said = time.monotonic() + _PROGRESS_SECONDS, 0

  def __call__(self) -> None:
    """Prints the last training metrics, if a line is due."""
    if time.monotonic() < self._due:
      return
    self._due = time.monotonic() + _PROGRESS_SECONDS
    lines = [x for x in metrics.read(self._home) if x["split"] == "train"]
    if lines and lines[-1]["step"] > self._said:
      values = lines[-1]
      step, seconds = values["step"], values["seconds"]
      self._said = step
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
  spent = records.usage(folder, run)
  fields = {**ending, **spent, **_sum(spent, used), "arguments": arguments}
  if status == records.FAILED:
    print(f"  {run.identity}: failed: {ending['reason']}", flush=True)
  if status == records.TRAINED:
    home = records.run_workdir(folder, run)
    outcome = _outcome(home)
    machine = usage.machine() | {"device": workdir.device(home)}
    fields |= {**outcome, "machine": machine, "measured": {}}
    # Choosing runs are not reported, so their cost is not measured.
    status = records.DONE if run.choosing else records.TRAINED
    numbers = {
      k: v for k, v in outcome["final"].items() if k not in _NOT_METRICS
    }
    print(f"  {run.identity}: {metrics.format_values(numbers)}", flush=True)
  records.write(folder, run, status=status, **fields)


def _outcome(home: Path) -> dict[str, Any]:
  """Reads the results of a run from its workdir, for its record.

  'final' is the last evaluation, and 'history' has all lines. If the task is judged
  by BLEU, 'sentences' has ten numbers for each sentence of the last split.
  """
  history = metrics.read(home)
  final = [line for line in history if line["split"] != "train"][-1]
  outcome = {"final": final, "history": history}
  sentences = atomic.read_json(home / evaluate.SENTENCES)
  return outcome | ({"sentences": sentences["statistics"]} if sentences else {})


def _sum(spent: Mapping[str, float | None], used: usage.Usage) -> usage.Usage:
  """Adds up the usage of a run's processes: the sum of seconds, the maximum of the rest."""
  total = dict(used)
  for name, value in spent.items():
    if value is not None and name in used:
      reduction = sum if name.endswith("seconds") else max
      total[name] = reduction((value, used[name]))
  return total
