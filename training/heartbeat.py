"""Which process of several is lost: each counts in a file that the others read.

JAX ends the processes that are left, after some time, with a report of several
lines. This names the lost one first, in one line that says what to do. A process
that hangs but whose threads run is not noticed, here or by JAX.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import sys
import threading
import time
from typing import NoReturn

from training import cluster

EVERY_SECONDS = 5.0
LOST_SECONDS = 60.0
"""Twice as long as a pause that a run survives; less than JAX waits."""

_DONE = "done"


@contextlib.contextmanager
def kept(folder: pathlib.Path) -> Iterator[None]:
  """Within it, this process ends as soon as another one is lost.

  Args:
    folder: that all processes see.
  """
  if not cluster.are_several():
    yield
    return
  import jax

  own, count = jax.process_index(), jax.process_count()
  beats = folder / ".processes"
  beats.mkdir(exist_ok=True)
  _write(beats, own, f"{os.getpid()} 0")
  # None reads what a process of an earlier run left.
  cluster.wait("heartbeat")
  stop = threading.Event()
  thread = threading.Thread(
    target=watch, args=(beats, own, count, stop, _end), daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    _write(beats, own, _DONE)


def watch(
  folder: pathlib.Path,
  own: int,
  count: int,
  stop: threading.Event,
  lost: Callable[[int, int], None],
  every: float = EVERY_SECONDS,
  limit: float = LOST_SECONDS,
) -> None:
  """Counts for the others, and calls `lost` for the first that is silent.

  Args:
    folder: with a file for each process.
    own: number of this process.
    count: of the processes.
    stop: ends it.
    lost: gets the number of a process and `count`.
    every: seconds between two looks.
    limit: seconds without a change after which a process is lost.
  """
  seen: dict[int, tuple[str, float]] = {}
  beat, looked = 0, time.monotonic()
  while not stop.wait(every):
    beat += 1
    _write(folder, own, f"{os.getpid()} {beat}")
    now = time.monotonic()
    if now - looked > 2 * every:
      # This process was halted, and does not know for how long the others were.
      seen.clear()
    looked = now
    for other in range(count):
      text = _read(folder, other)
      if other == own or text == _DONE:
        continue
      last, since = seen.get(other, (None, now))
      if text != last:
        seen[other] = text, now
      elif now - since > limit:
        return lost(other, count)


def _end(number: int, count: int) -> NoReturn:
  print(
    f"process {number} of {count} is lost (silent for {LOST_SECONDS:.0f} s); start "
    "all of them again with the same command, and they continue from the last "
    "checkpoint",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def _write(folder: pathlib.Path, number: int, text: str) -> None:
  # A disk that is full is told where the run writes what matters.
  with contextlib.suppress(OSError):
    (folder / str(number)).write_text(text)


def _read(folder: pathlib.Path, number: int) -> str:
  try:
    return (folder / str(number)).read_text()
  except OSError:
    return ""
