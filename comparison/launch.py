"""Runs what a comparison still lacks, each run in a process of its own."""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import math
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

from comparison import records
from comparison.plan import Run
from process import claimed, host_load
from process.errors import RunError, one_line
from training import metrics

_ROOT = Path(__file__).parent.parent
_TRAIN = [str(_ROOT / "train.py")]
_MEASURE = ["-m", "comparison.measure"]
_BUDGETS = "budgets"


_TRIES = 2
_FAULT = 2  # What `process.entry` ends with for a fault in what was typed.


Usage = dict[str, float | None]
"""What a process took, by the names of columns of results.csv."""


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a process ended.

  Attributes:
    error: why it failed, on one line; empty where it did not.
    usage: 'seconds', 'cpu_seconds', 'peak_bytes', its largest resident size, and
      'others_cores', what other programs used of the machine meanwhile.
    is_final: another try would end alike: it was asked for what cannot be.
  """

  error: str
  usage: Usage
  is_final: bool = False


def launch(runs: Sequence[Run], workdir: Path, map_seed: int) -> None:
  """Runs all that has no result yet, and says so as each ends.

  A run is `train.py` itself with its own folder, so a comparison that was killed
  continues its unfinished run where that was; `comparison.measure` then
  measures it. What failed is tried twice, and again with the next call.

  Args:
    runs: of the plan, or one shard of it.
    workdir: of the comparison.
    map_seed: of the runs whose attention maps are kept, all of one example.

  Raises:
    RunError: a record cannot be written.
  """
  with _stoppable():
    for number, run in enumerate(runs, 1):
      status = records.status(workdir, run)
      if status in (records.DONE, records.UNSUPPORTED):
        continue
      name = f"[{number}/{len(runs)}] {run.identity}"
      if run.obstacle:
        records.write(workdir, run, status=records.UNSUPPORTED)
        print(f"{name}: not supported: {run.obstacle}", flush=True)
        continue
      print(f"{name}: {run.slots}; {run.parameters:,} parameters", flush=True)
      with records.running(workdir, run):
        if status != records.TRAINED:
          told = _train(run, workdir)
          print(f"  {told}", flush=True)
        if records.status(workdir, run) == records.TRAINED:
          told = _measure(run, workdir, with_map=run.seed == map_seed)
          print(f"  {told}", flush=True)


def loss_at(run: Run, workdir: Path, share: float) -> float:
  """Loss on the first held-out split after a share of a run's steps.

  Trains the run to there where it has not been, and no further.

  Args:
    run: that can be.
    workdir: of the comparison.
    share: of its steps, between 0 and 1.

  Returns:
    The loss; infinite where the run failed.

  Raises:
    RunError: a record cannot be written.
  """
  with _stoppable():
    try:
      step = max(1, round(share * (run.steps or _budgeted_steps(run, workdir))))
    except RunError as error:
      print(f"  {_failed(run, workdir, f'budget: {error}')}", flush=True)
      return math.inf
    found = _evaluated(run, workdir, step)
    if found is None:
      print(f"to step {step}: {run.identity}", flush=True)
      with records.running(workdir, run):
        print(f"  {_train(run, workdir, stop_at=step)}", flush=True)
      found = _evaluated(run, workdir, step)
  return math.inf if found is None else found["loss"]


def _evaluated(run: Run, workdir: Path, step: int) -> dict[str, Any] | None:
  """The evaluation of a run at a step; None where it has none."""
  lines = records.history(workdir, run)
  return next(
    (x for x in lines if x["step"] == step and x["split"] != "train"), None
  )


def _train(run: Run, workdir: Path, stop_at: int | None = None) -> str:
  """Makes one run, writes its record and says how it went."""
  folder = workdir / records.RUNS / run.identity
  arguments = run.arguments
  if run.budget_seconds is not None:
    try:
      steps = _budgeted_steps(run, workdir)
    except RunError as error:
      return _failed(run, workdir, f"budget: {error}")
    arguments = [*arguments, f"--config.num_steps={steps}"]
  spent = records.usage(workdir, run)

  def write(status, **found):
    records.write(
      workdir, run, status=status, arguments=arguments, **spent, **found
    )

  def interrupted(usage):
    spent.update(_sum(spent, usage))
    write(records.STOPPED, reason="stopped; the same command continues it")

  options = [] if stop_at is None else [f"--stop_at={stop_at}"]
  command = [*_TRAIN, *arguments, *options, f"--workdir={folder}"]
  for left in reversed(range(_TRIES)):
    ended = _run(command, interrupted)
    # What an interrupted process took, or one that failed, counts as well.
    spent.update(_sum(spent, ended.usage))
    if not ended.error:
      break
    if ended.is_final or not left:
      write(records.FAILED, reason=ended.error)
      return f"failed: {ended.error}"
    print(f"  failed: {ended.error}; tried again", flush=True)
  history = metrics.read(folder)
  final = [record for record in history if record["split"] != "train"][-1]
  values = {
    k: v for k, v in final.items() if k not in ("step", "split", "seconds")
  }
  if stop_at is None:
    write(records.TRAINED, final=final, history=history, measured={})
  else:
    write(records.STOPPED, reason=f"at step {stop_at}; it may go on")
  return metrics.format_values(values)


def _failed(run: Run, workdir: Path, reason: str) -> str:
  records.write(workdir, run, status=records.FAILED, reason=reason)
  return f"failed: {reason}"


def _sum(spent: Usage, usage: Usage) -> Usage:
  """What several processes of a run took: seconds add up, all else is the most."""
  found: Usage = {}
  for name, value in usage.items():
    values = [x for x in (value, spent.get(name)) if x is not None]
    together = sum if name.endswith("seconds") else max
    found[name] = together(values) if values else None
  return found


def _measure(run: Run, workdir: Path, *, with_map: bool) -> str:
  """Measures a trained run and completes its record."""
  folder = workdir / records.RUNS / run.identity
  out = folder / "measured.json"
  options = ["--map"] if with_map else []
  ended = _run([*_MEASURE, f"--workdir={folder}", f"--out={out}", *options])
  if ended.error:
    # It stays to be measured: the same command tries again.
    records.update(workdir, run, reason=f"measuring: {ended.error}")
    return f"not measured: {ended.error}"
  measured = json.loads(out.read_text())
  records.update(
    workdir, run, status=records.DONE, measured=measured, reason=""
  )
  return (
    f"step {1e3 * measured['step_seconds']:.1f} ms, "
    f"compiling {measured['compile_seconds']:.1f} s"
  )


def _budgeted_steps(run: Run, workdir: Path) -> int:
  """A budget of seconds as a number of steps, timed once for all seeds.

  Raises:
    RunError: the step cannot be timed.
  """
  assert run.budget_seconds is not None  # Otherwise `run.steps` is known.
  folder = workdir / _BUDGETS
  folder.mkdir(exist_ok=True)
  path = folder / f"{run.family}.json"
  found = claimed.parsed(path)
  if found is None:
    ended = _run([*_MEASURE, *run.arguments, f"--out={path}"])
    if ended.error:
      raise RunError(ended.error)
    found = json.loads(path.read_text())
  return max(1, round(run.budget_seconds / found["step_seconds"]))


def _run(command: Sequence[str], interrupted: Any = None) -> Ended:
  """Runs a Python program to its end, without its output.

  Args:
    command: script or module, and arguments.
    interrupted: called with the usage so far where this process is stopped.
  """
  start, others = time.perf_counter(), host_load.Others()
  process = subprocess.Popen(
    [sys.executable, *command],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stderr is not None
    with process.stderr as stream:
      error = stream.read()
    # Of this child alone, where resource.getrusage adds up all of them.
    _, status, usage = os.wait4(process.pid, 0)
  except BaseException:
    process.terminate()  # It saves itself and continues next time.
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    if interrupted is not None:
      interrupted(_usage(start, usage, others))
    raise
  process.returncode = os.waitstatus_to_exitcode(status)
  reason = ""
  if process.returncode:
    # Of a traceback the last line says what went wrong.
    last = error.strip().splitlines()[-1:] or ["no message"]
    reason = f"exit code {process.returncode}: {one_line(RuntimeError(*last))}"
  return Ended(
    reason, _usage(start, usage, others), process.returncode == _FAULT
  )


def _usage(start: float, usage: Any, others: host_load.Others) -> Usage:
  cpu_seconds = usage.ru_utime + usage.ru_stime
  return {
    "seconds": time.perf_counter() - start,
    "cpu_seconds": cpu_seconds,
    "peak_bytes": usage.ru_maxrss * _RSS_UNIT,
    "others_cores": others.cores(cpu_seconds),
  }


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
  """SIGTERM ends as Ctrl-C does, so that the child is stopped as well.

  Raises:
    RunError: a file cannot be written, as on a full disk.
  """

  def stop(signum, frame):
    del frame
    sys.exit(128 + signum)

  before = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  except OSError as error:
    raise RunError(
      f"{one_line(error)}; the same command continues the comparison"
    ) from error
  finally:
    signal.signal(signal.SIGTERM, before)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
