"""What a fault is, and the list of them."""

from collections.abc import Callable, Sequence
import dataclasses
import pathlib
import subprocess

import numpy as np

Trial = Callable[[np.random.Generator, pathlib.Path], str]
"""`(rng, folder) -> what was lost`; raises AssertionError where a promise is broken."""


@dataclasses.dataclass(frozen=True)
class Fault:
  """One kind of fault.

  Attributes:
    name: what happens.
    times: trials of a whole campaign.
    promise: what must hold.
    trial: one of them, in an empty folder of its own.
  """

  name: str
  times: int
  promise: str
  trial: Trial


class NotHere(Exception):  # noqa: N818 - it is no error
  """This machine cannot make the fault."""


FAULTS: list[Fault] = []


def fault(name: str, times: int, promise: str) -> Callable[[Trial], Trial]:
  """Adds a function to `FAULTS`."""

  def add(trial: Trial) -> Trial:
    FAULTS.append(Fault(name, times, promise, trial))
    return trial

  return add


def require(condition: object, *told: object) -> None:
  """Raises AssertionError with what was found."""
  if not condition:
    raise AssertionError("; ".join(str(x)[-600:] for x in told))


def one_line(code: int, error: str, codes: Sequence[int] = (1, 2)) -> str:
  """The line by which a command ended that refused something."""
  lines = [x for x in error.splitlines() if not x.startswith("checkpoint ")]
  require(code in codes, f"exit code {code}", error)
  require(len(lines) == 1, f"{len(lines)} lines instead of one", error)
  require(len(lines[0]) < 1500, "a line of", len(lines[0]), "characters")
  return lines[0]


def shell(*command: object) -> None:
  """Runs a command of the system, or skips the trial."""
  words = [str(x) for x in command]
  done = subprocess.run(words, capture_output=True, text=True, check=False)
  if done.returncode:
    raise NotHere(f"{' '.join(words)}: {done.stderr.strip()}")
