"""The process that trains and measures runs, as one that a comparison starts."""

from collections.abc import Mapping
import functools
import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

from settings.errors import one_line
from training.signals import Signals

_STOPPING = (
  "stopping: a step that runs is finished and saved; run it again to continue"
)
_COMMAND = ["-m", "comparison.group"]


def run(request: Mapping[str, Any]) -> str:
  """Runs `comparison.group` to its end and prints what it says.

  SIGTERM and SIGINT stop it, which saves itself, and then this process; that they
  came is said at once.

  Args:
    request: JSON-ready, its standard input.

  Returns:
    Why it failed, on one line; empty where it did not.
  """
  with (
    tempfile.TemporaryFile("w+") as inputs,
    tempfile.TemporaryFile("w+") as errors,
  ):
    json.dump(request, inputs)
    inputs.seek(0)
    with (
      subprocess.Popen(
        [sys.executable, *_COMMAND],
        stdin=inputs,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
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
