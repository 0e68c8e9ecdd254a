"""The process that trains and measures runs, as one that a comparison starts."""

from collections.abc import Iterator, Mapping
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

from settings.errors import one_line

_COMMAND = ["-m", "comparison.group"]


def run(request: Mapping[str, Any]) -> str:
  """Runs `comparison.group` to its end and prints what it says.

  SIGTERM and SIGINT stop it, which saves itself, and then this process.

  Args:
    request: JSON-ready, its standard input.

  Returns:
    Why it failed, on one line; empty where it did not.
  """
  with (
    tempfile.TemporaryFile("w+") as inputs,
    tempfile.TemporaryFile("w+") as errors,
    _exit_at_sigterm(),
  ):
    json.dump(request, inputs)
    inputs.seek(0)
    process = subprocess.Popen(
      [sys.executable, *_COMMAND],
      stdin=inputs,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
    )
    try:
      assert process.stdout is not None
      with process.stdout as lines:
        # Where a notebook shows it, too.
        for line in lines:
          print(line, end="", flush=True)
    except BaseException:
      process.terminate()
      raise
    finally:
      process.wait()
    if not process.returncode:
      return ""
    errors.seek(0)
    # The last line of a traceback says what went wrong.
    *_, last = errors.read().strip().splitlines() or ["no message"]
    return f"exit code {process.returncode}: {one_line(RuntimeError(last))}"


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
  def stop(signum, frame):
    del frame
    sys.exit(128 + signum)

  handler = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, handler)
