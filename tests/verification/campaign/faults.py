"""Faults of the campaign: their type, their list, and shared checks."""

from collections.abc import Callable, Sequence
import dataclasses
import pathlib
import subprocess

import numpy as np

Trial = Callable[[np.random.Generator, pathlib.Path], str]
"""`(rng, folder) -> what was lost`; raises AssertionError for a broken promise."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """One kind of fault.

  Attributes:
    name: what happens.
    times: the largest number of trials.
    promise: what must hold.
    trial: runs one trial in its own empty folder.
  """

  name: str
  times: int
  promise: str
  trial: Trial


class NotSupported(Exception):  # noqa: N818 - not an error
  """This machine cannot cause the fault."""


FAULTS: list[Fault] = []


def fault(name: str, times: int, promise: str) -> Callable[[Trial], Trial]:
  """Adds a function to `FAULTS`."""

  def add(trial: Trial) -> Trial:
    FAULTS.append(Fault(name, times, promise, trial))
    return trial

  return add


def require(condition: object, *details: object) -> None:
  """Raises AssertionError with details unless a condition is true."""
  if not condition:
    raise AssertionError("; ".join(str(x)[-600:] for x in details))


def one_line(code: int, error: str, codes: Sequence[int] = (1, 2)) -> str:
  """Returns the single line of an error, after checks of its form."""
  lines = [x for x in error.splitlines() if not x.startswith("checkpoint ")]
  require(code in codes, f"exit code {code}", error)
  require(len(lines) == 1, f"{len(lines)} lines instead of one", error)
  require(len(lines[0]) < 1500, "a line of", len(lines[0]), "characters")
  return lines[0]


def shell(*command: object) -> None:
  """Runs a system command, and skips the trial if it fails."""
  words = [str(x) for x in command]
  done = subprocess.run(words, capture_output=True, text=True, check=False)
  if done.returncode:
    raise NotSupported(f"{' '.join(words)}: {done.stderr.strip()}")
