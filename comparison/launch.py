"""Runs what a comparison still lacks, each run in a process of its own."""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

from comparison import records
from comparison.plan import Run
from process import claimed
from process.errors import RunError, one_line
from training import metrics

_ROOT = Path(__file__).parent.parent
_TRAIN = [str(_ROOT / "train.py")]
_MEASURE = ["-m", "comparison.measure"]
_BUDGETS = "budgets"


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a process ended.

  Attributes:
    error: why it failed, on one line; empty where it did not.
    usage: 'seconds', 'cpu_seconds' and 'peak_bytes', its largest resident size.
  """

  error: str
  usage: dict[str, float]


def launch(runs: Sequence[Run], workdir: Path, map_seed: int) -> None:
  """Runs all that has no result yet, and says so as each ends.

  A run is `train.py` itself with its own folder, so a comparison that was killed
  continues its unfinished run where that was; `comparison.measure` then
  measures it. What failed is tried again.

  Args:
    runs: of the plan, or one shard of it.
    workdir: of the comparison.
    map_seed: of the runs whose attention maps are kept, all of one example.
  """
  with _terminable():
    for number, run in enumerate(runs, 1):
      name = f"[{number}/{len(runs)}] {run.identity}"
      status = records.status(workdir, run)
      if status in (records.DONE, records.UNSUPPORTED):
        continue
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


def _train(run: Run, workdir: Path) -> str:
  """Makes one run, writes its record and says how it went."""
  folder = workdir / records.RUNS / run.identity
  try:
    arguments = [*run.arguments, *_budgeted(run, workdir)]
  except RunError as error:
    records.write(
      workdir, run, status=records.FAILED, reason=f"budget: {error}"
    )
    return f"failed: budget: {error}"
  before = records.usage(workdir, run)

  def write(status, usage, **found):
    """The record; what an interrupted process took counts as well."""
    total = {name: value + before.get(name, 0) for name, value in usage.items()}
    total["peak_bytes"] = max(usage["peak_bytes"], before.get("peak_bytes", 0))
    records.write(
      workdir, run, status=status, arguments=arguments, **total, **found
    )

  ended = _run(
    [*_TRAIN, *arguments, f"--workdir={folder}"],
    interrupted=lambda usage: write(
      records.STOPPED, usage, reason="stopped; the same command continues it"
    ),
  )
  if ended.error:
    write(records.FAILED, ended.usage, reason=ended.error)
    return f"failed: {ended.error}"
  history = metrics.read(folder)
  final = [record for record in history if record["split"] != "train"][-1]
  write(records.TRAINED, ended.usage, final=final, history=history, measured={})
  values = {
    k: v for k, v in final.items() if k not in ("step", "split", "seconds")
  }
  return metrics.format_values(values)


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


def _budgeted(run: Run, workdir: Path) -> list[str]:
  """A budget of seconds as a number of steps, timed once for all seeds.

  Raises:
    RunError: the step cannot be timed.
  """
  if run.budget_seconds is None:
    return []
  folder = workdir / _BUDGETS
  folder.mkdir(exist_ok=True)
  path = folder / f"{run.family}.json"
  found = claimed.parsed(path)
  if found is None:
    ended = _run([*_MEASURE, *run.arguments, f"--out={path}"])
    if ended.error:
      raise RunError(ended.error)
    found = json.loads(path.read_text())
  steps = max(1, round(run.budget_seconds / found["step_seconds"]))
  return [f"--config.num_steps={steps}"]


def _run(command: Sequence[str], interrupted: Any = None) -> Ended:
  """Runs a Python program to its end, without its output.

  Args:
    command: script or module, and arguments.
    interrupted: called with the usage so far where this process is stopped.
  """
  start = time.perf_counter()
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
      interrupted(_usage(start, usage))
    raise
  process.returncode = os.waitstatus_to_exitcode(status)
  reason = ""
  if process.returncode:
    # Of a traceback the last line says what went wrong.
    last = error.strip().splitlines()[-1:] or ["no message"]
    reason = f"exit code {process.returncode}: {one_line(RuntimeError(*last))}"
  return Ended(reason, _usage(start, usage))


def _usage(start: float, usage: Any) -> dict[str, float]:
  return {
    "seconds": time.perf_counter() - start,
    "cpu_seconds": usage.ru_utime + usage.ru_stime,
    "peak_bytes": usage.ru_maxrss * _RSS_UNIT,
  }


@contextlib.contextmanager
def _terminable():
  """SIGTERM ends as Ctrl-C does, so that the child is stopped as well."""

  def stop(signum, frame):
    del frame
    sys.exit(128 + signum)

  before = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
