"""Several processes that are one run, on JAX's own distributed runtime.

Imports JAX only where it is asked for: `--help` does not wait for it.
"""

import faulthandler
import os
import sys
from typing import Any, NoReturn

from settings.errors import ConfigError, one_line

_HEARTBEAT_SECONDS = 100
"""A process that is silent for so long is lost to JAX, which ends the others."""

_JOIN_SECONDS = 300

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
  if coordinator is not None and process_id is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
      raise ConfigError(
        f"--coordinator: expected HOST:PORT, got {coordinator!r}"
      )
    if not 0 <= process_id < (num_processes or 0):
      raise ConfigError(
        f"--process_id: expected 0 to {(num_processes or 0) - 1}, for "
        f"--num_processes={num_processes}, got {process_id}"
      )
  import jax

  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      initialization_timeout=_JOIN_SECONDS,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
  except (RuntimeError, ValueError) as error:
    raise ConfigError(f"--coordinator: {one_line(error)}") from error
  # JAX ends a process whose peer is lost by SIGABRT, and says which; stacks of all
  # threads would hide that.
  faulthandler.disable()
  if not is_first():
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def is_first() -> bool:
  """Whether this process writes what a run writes once."""
  import jax

  return jax.process_index() == 0


def are_several() -> bool:
  """Whether this run has other processes."""
  import jax

  return jax.process_count() > 1


def wait(name: str) -> None:
  """Returns when all processes have come here."""
  if are_several():
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
  """Whether a flag is True in any process; all have to ask."""
  if not are_several():
    return flag
  from jax.experimental import multihost_utils
  import numpy as np

  return bool(multihost_utils.process_allgather(np.array(flag)).any())


def total(numbers: Any) -> Any:
  """The sum over processes of an array of uint64, modulo 2⁶⁴; all have to ask."""
  from jax.experimental import multihost_utils
  import numpy as np

  # JAX has no 64 bits unless it is told to.
  halves = multihost_utils.process_allgather(numbers.view(np.uint32))
  return np.asarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)


def end_lost(error: BaseException) -> NoReturn:
  """Ends this process after what a lost one leaves behind, or raises it again.

  Where a process is gone, the others' next exchange fails; nothing that has to be
  agreed on, as an orderly end, is possible then.

  Raises:
    BaseException: `error`, in a run of one process.
  """
  import jax

  if jax.process_count() == 1:
    raise error
  end(
    f"process {jax.process_index()} of {jax.process_count()}: another process of "
    f"this run is lost ({one_line(error)})"
  )


def end(fault: str) -> NoReturn:
  """Ends this process at once, with one line: the others cannot be waited for."""
  print(
    f"{fault}; start all of them again with the same command, and they continue "
    "from the last checkpoint",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def _is_scheduled() -> bool:
  """Whether a scheduler started several processes in a way that JAX knows."""
  for name, is_several in _RECOGNISED:
    value = os.environ.get(name, "")
    try:
      if value and is_several(value):
        return True
    except ValueError:  # Not a number, so it is not what JAX reads.
      continue
  return False
