"""Forks entry points from a process that has imported their libraries.

The imports of an entry point take 2 to 3 s of processor time, and the suite runs about
a hundred. This process imports once and then forks for each command. JAX's backend
starts in the child, as in a separate process.

A request is one line of JSON on standard input, and the answer is one line on standard
output: the process id of a new fork, or the exit code of the requested one, null while
it runs.
"""

import json
import os
import runpy
import sys
import traceback
import warnings

import jax

from training.devices import process


def preload() -> None:
  """Imports the libraries of entry points without starting a backend."""
  import flax.linen
  import matplotlib.figure
  import optax
  import pandas
  import scipy.stats

  import models.api
  import models.decoding
  import training.evaluate
  import training.experiment
  import training.inference.generation
  import training.loop

  # Other modules are not imported, since tests check when commands import them.
  del flax, matplotlib, optax, pandas, scipy, models, training


def serve() -> None:
  """Answers requests until standard input ends."""
  preload()
  # A fork of a process with threads may deadlock if a thread held a lock. The threads
  # here are idle ones of OpenBLAS and jemalloc, which both support forks.
  warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
  for line in sys.stdin:
    request = json.loads(line)
    if "ended" in request:
      pid, status = os.waitpid(request["ended"], os.WNOHANG)
      answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
      answer = os.fork()
      if answer == 0:
        _run_entry_point(request)
    print(json.dumps(answer), flush=True)


def _refuse_network(event: str, arguments: tuple) -> None:
  """Raises PermissionError if a command opens a network connection."""
  if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
    raise PermissionError(f"network access: {event} {arguments[-2:]}")


def _run_entry_point(request: dict) -> None:
  """Runs an entry point in this process, without a network, and ends it."""
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
    os.dup2(os.open(request[name], flags), number)
  code = 1
  try:
    os.environ.clear()
    os.environ.update(request["environment"])
    # A separate process does this before its imports.
    process.avoid_faulty_fusion()
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.addaudithook(_refuse_network)
    sys.path[1:1] = filter(None, [os.environ.get("PYTHONPATH")])
    if request["is_module"]:
      runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
      sys.path[0] = os.path.dirname(sys.argv[0])
      runpy.run_path(sys.argv[0], run_name="__main__")
    code = 0
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
  serve()
