"""Python programs that a comparison starts: what they print, what they took, why they failed."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

from comparison.usage import Meter, Usage
from settings.errors import one_line

_NOTE = "\n--------------------\nFor simplicity, JAX has removed"

_FAULT = 2  # What `training.entry` ends with for a fault in what was typed.


@dataclasses.dataclass(frozen=True)
class Ended:
  """How a process ended.

  Attributes:
    error: why it failed, on one line; empty where it did not.
    usage: what it took.
    is_final: another try would end alike: it was asked for what cannot be.
  """

  error: str
  usage: Usage
  is_final: bool = False


def run(
  command: Sequence[str], interrupted: Callable[[Usage], None] | None = None
) -> Ended:
  """Runs a Python program to its end, without its output.

  Args:
    command: script or module, and arguments.
    interrupted: called with the usage so far where this process is stopped.
  """
  meter = Meter()
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
      interrupted(meter.read(usage))
    raise
  process.returncode = os.waitstatus_to_exitcode(status)
  return Ended(
    _reason(process.returncode, error),
    meter.read(usage),
    process.returncode == _FAULT,
  )


def listen(
  command: Sequence[str], heard: Callable[[dict[str, Any]], None]
) -> str:
  """Runs a Python program and hears each line of JSON that it prints.

  Args:
    command: script or module, and arguments.
    heard: called with what each line says.

  Returns:
    Why it failed, on one line; empty where it did not.
  """
  with tempfile.TemporaryFile("w+") as errors:
    process = subprocess.Popen(
      [sys.executable, *command],
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
    )
    assert process.stdout is not None
    try:
      with _passed_on(process), process.stdout as lines:
        for line in lines:
          if line.startswith("{"):  # Libraries may have something to say, too.
            heard(json.loads(line))
    except BaseException:
      process.terminate()
      raise
    finally:
      process.wait()
    errors.seek(0)
    return _reason(process.returncode, errors.read())


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[str]) -> Iterator[None]:
  """SIGTERM and SIGINT stop a process, which saves itself, and then this one.

  What it says meanwhile is heard: an exception in the midst of a line would lose it.
  """
  came: list[int] = []
  before = {
    number: signal.getsignal(number)
    for number in (signal.SIGTERM, signal.SIGINT)
  }

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  def stop(signum, frame):
    del frame
    came.append(signum)
    restore()  # The second one ends this process at once.
    process.terminate()

  for number in before:
    signal.signal(number, stop)
  try:
    yield
  finally:
    restore()
  if came:
    sys.exit(128 + came[0])


def _reason(code: int, error: str) -> str:
  """Why a process failed, on one line; empty where it did not."""
  if not code:
    return ""
  # Of a traceback the last line says what went wrong; JAX adds a note below it.
  lines = error.partition(_NOTE)[0].strip().splitlines()
  last = lines[-1:] or ["no message"]
  return f"exit code {code}: {one_line(RuntimeError(*last))}"
