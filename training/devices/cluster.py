"""Runs of several processes, on JAX's distributed runtime.

The processes join, agree on values that must be equal in all of them, and end together.
The first process (`jax.process_index() == 0`) writes the files of the run.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import faulthandler
import hashlib
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils
import numpy as np

from settings.errors import ConfigError, one_line

_JOIN_SECONDS = 300
_BEAT_SECONDS = 5.0
_LOST_SECONDS = 60.0
"""A process without a heartbeat for this time is lost: twice a pause that a run
survives."""
_JAX_LOST_SECONDS = 100
"""The time after which JAX itself ends the other processes, by SIGABRT and with a
report of several lines."""
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
"""The variables by which `jax.distributed` recognises SLURM, Open MPI, an indexed job
of Kubernetes, and a TPU pod."""


def join(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  """Joins the other processes of the run, if there are any.

  Call it before devices are used. Give all arguments or none; without arguments, JAX
  asks the scheduler, if it knows the scheduler. Processes other than the first print
  only errors.

  Args:
    coordinator: HOST:PORT of the first process.
    num_processes: the number of processes of the run.
    process_id: the number of this process, counted from 0.

  Raises:
    ConfigError: some flags are missing, or the other processes do not join.
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
      "HOST:PORT, --num_processes and --process_id, or none of them under a "
      "scheduler that JAX knows"
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
  # JAX reports which process is lost; stacks of all threads would hide it.
  faulthandler.disable()
  if jax.process_index() > 0:
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _is_scheduled() -> bool:
  """Returns whether a scheduler started several processes in a way that JAX knows."""
  for name, is_several in _RECOGNISED:
    value = os.environ.get(name, "")
    # JAX reads only numbers.
    with contextlib.suppress(ValueError):
      if value and is_several(value):
        return True
  return False


def wait(name: str) -> None:
  """Waits until all processes have called this function."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
  """Returns whether a flag is True in any process; all processes must call it."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def differs(content: Any) -> bool:
  """Returns whether processes have different JSON content; all must call it."""
  if jax.process_count() == 1:
    return False
  text = json.dumps(content, sort_keys=True)
  digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
  digests = np.asarray(multihost_utils.process_allgather(digest))
  return bool((digests != digests[0]).any())


def total(numbers: np.ndarray) -> np.ndarray:
  """Sums an array of uint64 over all processes, modulo 2⁶⁴; all must call this."""
  # JAX has no 64-bit types by default.
  halves = multihost_utils.process_allgather(numbers.view(np.uint32))
  return np.asarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


@contextlib.contextmanager
def heartbeat(folder: pathlib.Path) -> Iterator[None]:
  """Ends this process with one line if another one is lost within the context.

  Each process counts in its own file in `folder`, which all processes can read.
  Processes that hang while their threads run are not detected.
  """
  if jax.process_count() == 1:
    yield
    return
  beats, count = folder / ".processes", jax.process_count()
  beats.mkdir(exist_ok=True)
  files, index = [beats / str(i) for i in range(count)], jax.process_index()
  _write(files[index], "0")
  # Wait, so that no process reads a count of an earlier run.
  wait("heartbeat")

  def on_lost(number):
    reason = f"silent for {_LOST_SECONDS:.0f} s"
    _end(f"process {number} of {count} is lost ({reason})")

  stop = threading.Event()
  thread = threading.Thread(
    target=watch, args=(files, index, stop, on_lost), daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    _write(files[index], _DONE)


def watch(
  files: Sequence[pathlib.Path],
  index: int,
  stop: threading.Event,
  on_lost: Callable[[int], None],
  every: float = _BEAT_SECONDS,
  limit: float = _LOST_SECONDS,
) -> None:
  """Counts until `stop` is set, and calls `on_lost` if another process stops counting.

  Args:
    files: one file per process.
    index: the number of this process.
    stop: the event that ends the loop.
    on_lost: called with the number of the lost process.
    every: seconds between two checks.
    limit: seconds without a change after which a process is lost.
  """
  counts: dict[int, tuple[str, float]] = {}
  beat, last_check = 0, time.monotonic()
  while not stop.wait(every):
    beat, now = beat + 1, time.monotonic()
    _write(files[index], str(beat))
    if now - last_check > 2 * every:
      # This process was suspended, and so may have been the others.
      counts.clear()
    last_check = now
    for number, file in enumerate(files):
      text = ""
      with contextlib.suppress(OSError):
        text = file.read_text("utf-8")
      if number == index or text == _DONE:
        continue
      if number not in counts or text != counts[number][0]:
        counts[number] = text, now
      elif now - counts[number][1] > limit:
        return on_lost(number)


def _write(file: pathlib.Path, text: str) -> None:
  # The run itself reports a full disk.
  with contextlib.suppress(OSError):
    file.write_text(text, "utf-8")


def end_lost(error: BaseException) -> NoReturn:
  """Ends this process after an error that a lost process caused.

  After a process is lost, the next collective operation of the others fails, and they
  cannot stop at the same step.

  Raises:
    BaseException: `error`, if the run has one process.
  """
  if jax.process_count() == 1:
    raise error
  _end(
    f"process {jax.process_index()} of {jax.process_count()}: another process of "
    f"this run is lost ({one_line(error)})"
  )


def _end(reason: str) -> NoReturn:
  """Ends this process immediately, with one line, without waiting for the others."""
  print(
    f"{reason}; start all of them again with the same command, and they continue "
    "from the last checkpoint",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)
