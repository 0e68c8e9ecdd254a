"""Runs Python in a separate process."""

from collections.abc import Callable, Mapping, Sequence
import functools
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from comparison.measurement import usage
from settings.errors import one_line
from training.signals import Signals

_STOPPING = (
  "stopping: the current step ends and is saved; run it again to continue"
)
_WATCH_SECONDS = 0.1

_ROOT = str(Path(__file__).parents[1])


class ProcessResult(NamedTuple):
  """The result of a process that has ended.

  Attributes:
    code: the exit code; if a signal ended the process, minus the signal's number.
    error: the last line of standard error, which has the error message.
    used: the time and memory of the process.
    stop: SIGTERM or SIGINT, if one was forwarded to the process.
  """

  code: int
  error: str
  used: usage.Usage
  stop: signal.Signals | None

  @property
  def fault(self) -> str:
    """The error on one line; empty if the process did not fail."""
    return f"exit code {self.code}: {self.error}" if self.code else ""

  def end_with_signal(self) -> None:
    """Ends this process as well if a signal was forwarded."""
    if self.stop == signal.SIGINT:
      raise KeyboardInterrupt
    if self.stop is not None:
      sys.exit(128 + self.stop)


def run(
  arguments: Sequence[str],
  request: Mapping[str, Any] | None = None,
  watch: Callable[[], None] = lambda: None,
) -> ProcessResult:
  """Runs Python in a separate process, and waits for its end.

  Reports SIGTERM and SIGINT immediately, and forwards them as SIGTERM.

  Args:
    arguments: the command-line arguments of Python.
    request: JSON-ready content of its standard input.
    watch: called repeatedly until the process ends.
  """
  with (
    tempfile.TemporaryFile("w+", encoding="utf-8") as inputs,
    tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
  ):
    json.dump(request, inputs)
    inputs.seek(0)
    meter = usage.Meter()
    # From another folder, Python would find no package, or that of another checkout.
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
      [sys.executable, *arguments],
      stdin=inputs,
      stdout=subprocess.DEVNULL,
      stderr=errors,
      # This process reads UTF-8 for any locale.
      env=os.environ
      | {"PYTHONIOENCODING": "utf-8:replace", "PYTHONPATH": path},
    )
    with process, Signals(functools.partial(_stop, process)) as signals:
      try:
        while not (result := os.wait4(process.pid, os.WNOHANG))[0]:
          watch()
          time.sleep(_WATCH_SECONDS)
      except BaseException:
        process.terminate()
        raise
      _, status, resources = result
      process.returncode = os.waitstatus_to_exitcode(status)
    errors.seek(0)
    *_, last = errors.read().strip().splitlines() or ["no message"]
    return ProcessResult(
      process.returncode,
      one_line(RuntimeError(last)),
      meter.read_child(resources),
      signals.stop,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
  """Reports a signal immediately, and ends the process with SIGTERM."""
  print(_STOPPING, flush=True)
  process.terminate()
