"""Several processes that are one run, on JAX's own distributed runtime.

They join, agree on what has to be the same in all of them, and end together.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import faulthandler
import os
import pathlib
import sys
import threading
import time
from typing import NoReturn

import jax
from jax.experimental import multihost_utils
import numpy as np

from settings.errors import ConfigError, one_line

_JOIN_SECONDS = 300
_BEAT_SECONDS = 5.0
_LOST_SECONDS = 60.0
"""A process that is silent for so long is lost: twice a pause that a run survives."""
_JAX_LOST_SECONDS = 100
"""JAX ends the others as well, later, by SIGABRT and a report of several lines."""
_DONE = "done"

_RECOGNISED = (
  ("SLURM_STEP_NUM_TASKS", lambda value: int(value) > 1),
  ("OMPI_COMM_WORLD_SIZE", lambda value: int(value) > 1),
  (
    "JOB_COMPLETION_INDEX",
    lambda value: "KUBERNETES_SERVICE_HOST" in os.environ,
  ),
  ("TPU_WORKER_HOSTNAMES", lambda value: "," in value),
)
"""Variables by which `jax.distributed` knows where it is: SLURM, Open MPI, an
indexed job of Kubernetes, and a TPU pod."""


def join(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  """Makes this process one of several, if it is one; before devices are used.

  All are told by flags, or none: then by the scheduler, where JAX knows it.
  Processes other than the first print nothing but faults.

  Args:
    coordinator: HOST:PORT of the first process.
    num_processes: of the run.
    process_id: of this one, from 0.

  Raises:
    ConfigError: some flags are missing, or the others do not come.
  """
  flags = {
    "coordinator": coordinator,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [name for name, value in flags.items() if value is None]
  if missing and len(missing) < len(flags):
    raise ConfigError(
      f"--{missing[0]}: missing; a run of several processes needs --coordinator="
      "HOST:PORT, --num_processes and --process_id, or none of them where a "
      "scheduler tells"
    )
  if missing and not _is_scheduled():
    return
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
      raise ConfigError(
        f"--coordinator: expected HOST:PORT, got {coordinator!r}"
      )
    if process_id not in range(num_processes or 0):
      raise ConfigError(
        f"--process_id: expected 0 to {(num_processes or 0) - 1}, for "
        f"--num_processes={num_processes}, got {process_id}"
      )
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      initialization_timeout=_JOIN_SECONDS,
      heartbeat_timeout_seconds=_JAX_LOST_SECONDS,
    )
  except (RuntimeError, ValueError) as error:
    raise ConfigError(f"--coordinator: {one_line(error)}") from error
  # JAX says which process is lost; stacks of all threads would hide that.
  faulthandler.disable()
  if not is_first():
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _is_scheduled() -> bool:
  """Whether a scheduler started several processes in a way that JAX knows."""
  for name, is_several in _RECOGNISED:
    value = os.environ.get(name, "")
    # What is not a number is not what JAX reads.
    with contextlib.suppress(ValueError):
      if value and is_several(value):
        return True
  return False


def is_first() -> bool:
  """Whether this process writes what a run writes once."""
  return jax.process_index() == 0


def are_several() -> bool:
  """Whether this run has other processes."""
  return jax.process_count() > 1


def wait(name: str) -> None:
  """Returns when all processes have come here."""
  if are_several():
    multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
  """Whether a flag is True in any process; all have to ask."""
  if not are_several():
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def total(numbers: np.ndarray) -> np.ndarray:
  """The sum over processes of an array of uint64, modulo 2⁶⁴; all have to ask."""
  # JAX has no 64 bits unless it is told to.
  halves = multihost_utils.process_allgather(numbers.view(np.uint32))
  return np.asarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


@contextlib.contextmanager
def heartbeat(folder: pathlib.Path) -> Iterator[None]:
  """Within it, this process ends, with one line, once another one is lost.

  Each counts in a file of `folder`, which all see. A process that hangs but whose
  threads run is not noticed.
  """
  if not are_several():
    yield
    return
  beats, count = folder / ".processes", jax.process_count()
  beats.mkdir(exist_ok=True)
  files, own = [beats / str(i) for i in range(count)], jax.process_index()
  _write(files[own], "0")
  # None reads what a process of an earlier run left.
  wait("heartbeat")

  def lost(number):
    silent = f"silent for {_LOST_SECONDS:.0f} s"
    _end(f"process {number} of {count} is lost ({silent})")

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
  every: float = _BEAT_SECONDS,
  limit: float = _LOST_SECONDS,
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
        text = file.read_text("utf-8")
      if number == own or text == _DONE:
        continue
      if number not in seen or text != seen[number][0]:
        seen[number] = text, now
      elif now - seen[number][1] > limit:
        return lost(number)


def _write(file: pathlib.Path, text: str) -> None:
  # A disk that is full is told where the run writes what matters.
  with contextlib.suppress(OSError):
    file.write_text(text, "utf-8")


def end_lost(error: BaseException) -> NoReturn:
  """Ends this process after what a lost one leaves behind, or raises it again.

  Where a process is gone, the others' next exchange fails; nothing that has to be
  agreed on, as an orderly end, is possible then.

  Raises:
    BaseException: `error`, in a run of one process.
  """
  if not are_several():
    raise error
  _end(
    f"process {jax.process_index()} of {jax.process_count()}: another process of "
    f"this run is lost ({one_line(error)})"
  )


def _end(fault: str) -> NoReturn:
  """Ends this process at once, with one line: the others cannot be waited for."""
  print(
    f"{fault}; start all of them again with the same command, and they continue "
    "from the last checkpoint",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)
