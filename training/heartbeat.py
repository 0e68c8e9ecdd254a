"""Which process of several is lost: each counts in a file that the others read.

JAX ends the processes that are left as well, later, by SIGABRT and a report of
several lines. A process that hangs but whose threads run is not noticed.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import pathlib
import threading
import time

from training import cluster

EVERY_SECONDS = 5.0
LOST_SECONDS = 60.0
"""Twice as long as a pause that a run survives; less than JAX waits."""

_DONE = "done"


@contextlib.contextmanager
def kept(folder: pathlib.Path) -> Iterator[None]:
  """Within it, this process ends, with one line, once another one is lost.

  Args:
    folder: that all processes see.
  """
  if not cluster.are_several():
    yield
    return
  import jax

  beats, count = folder / ".processes", jax.process_count()
  beats.mkdir(exist_ok=True)
  files, own = [beats / str(i) for i in range(count)], jax.process_index()
  _write(files[own], "0")
  # None reads what a process of an earlier run left.
  cluster.wait("heartbeat")

  def lost(number):
    silent = f"silent for {LOST_SECONDS:.0f} s"
    cluster.end(f"process {number} of {count} is lost ({silent})")

  stop = threading.Event()
  thread = threading.Thread(
    target=watch, args=(files, own, stop, lost), daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    _write(files[own], _DONE)


def watch(
  files: Sequence[pathlib.Path],
  own: int,
  stop: threading.Event,
  lost: Callable[[int], None],
  every: float = EVERY_SECONDS,
  limit: float = LOST_SECONDS,
) -> None:
  """Counts for the others until `stop`, or calls `lost` for one that is silent.

  Args:
    files: one for each process.
    own: number of this process.
    stop: ends it.
    lost: gets the number of a process.
    every: seconds between two looks.
    limit: seconds without a change after which a process is lost.
  """
  seen: dict[int, tuple[str, float]] = {}
  beat, looked = 0, time.monotonic()
  while not stop.wait(every):
    beat, now = beat + 1, time.monotonic()
    _write(files[own], str(beat))
    if now - looked > 2 * every:
      # This process was halted, and does not know for how long the others were.
      seen.clear()
    looked = now
    for number, file in enumerate(files):
      text = ""
      with contextlib.suppress(OSError):
        text = file.read_text()
      if number == own or text == _DONE:
        continue
      if text != seen.get(number, (None,))[0]:
        seen[number] = text, now
      elif now - seen[number][1] > limit:
        return lost(number)


def _write(file: pathlib.Path, text: str) -> None:
  # A disk that is full is told where the run writes what matters.
  with contextlib.suppress(OSError):
    file.write_text(text)
