"""Runs what a comparison still lacks, each run in a process of its own."""

from collections.abc import Sequence
import os
from pathlib import Path
import subprocess
import sys
import time

from comparison import records
from comparison.plan import Run
from training import metrics
from training.errors import one_line

_TRAIN = Path(__file__).parent.parent / "train.py"


def launch(runs: Sequence[Run], workdir: Path) -> None:
  """Runs all that has no result yet, and says so as each ends.

  A run is `train.py` itself with its own folder, so a comparison that was killed
  continues its unfinished run where that was. What failed is tried again.

  Args:
    runs: of the plan, or one shard of it.
    workdir: of the comparison.
  """
  for number, run in enumerate(runs, 1):
    if records.status(workdir, run) in (records.DONE, records.UNSUPPORTED):
      continue
    name = f"[{number}/{len(runs)}] {run.identity}"
    if run.obstacle:
      records.write(workdir, run, records.UNSUPPORTED)
      print(f"{name}: not supported: {run.obstacle}", flush=True)
      continue
    print(f"{name}: {run.parameters:,} parameters", flush=True)
    print(f"  {_one(run, workdir)}", flush=True)


def _one(run: Run, workdir: Path) -> str:
  """Makes one run, writes its record and says how it went."""
  folder = workdir / records.RUNS / run.identity
  start = time.perf_counter()
  process = subprocess.Popen(
    [sys.executable, str(_TRAIN), *run.arguments, f"--workdir={folder}"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stderr is not None
    with process.stderr as stream:
      error = stream.read()
    # Of this child alone, where resource.getrusage adds up all of them.
    _, wait_status, usage = os.wait4(process.pid, 0)
  except BaseException:
    process.terminate()  # It saves itself and continues next time.
    process.wait()
    raise
  process.returncode = os.waitstatus_to_exitcode(wait_status)
  found = {
    "seconds": time.perf_counter() - start,
    "cpu_seconds": usage.ru_utime + usage.ru_stime,
    "peak_bytes": usage.ru_maxrss * _RSS_UNIT,
  }
  if process.returncode:
    reason = one_line(RuntimeError(error.strip() or "no message"))
    reason = f"exit code {process.returncode}: {reason}"
    records.write(workdir, run, records.FAILED, **{**found, "reason": reason})
    return f"failed: {reason}"
  history = metrics.read(folder)
  final = [record for record in history if record["split"] != "train"][-1]
  records.write(
    workdir, run, records.DONE, **found, final=final, history=history
  )
  values = {k: v for k, v in final.items() if k not in ("step", "split")}
  return metrics.format_values(values)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
