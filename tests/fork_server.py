"""Starts entry points from a process that has imported their libraries.

An entry point spends 2 to 3 s of processor time on imports, of which the suite
would pay a hundred. This process imports once and then forks for every command:
JAX's backend starts in the child, as in a process of its own.

A request is one line of JSON on standard input, its answer one on standard output:
the process id of a fork, or the exit code of one that is asked for, null while it
runs.
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
  """Imports what entry points import, and starts no backend."""
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

  # The suite's other modules stay unimported: their tests are about that.
  del flax, matplotlib, optax, pandas, scipy, models, training


def serve() -> None:
  """Forks, and tells of forks, until standard input ends."""
  preload()
  # A fork of several threads may stop where one held a lock. Those here are idle
  # pools of OpenBLAS and jemalloc's own, which both expect forks.
  warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
  for line in sys.stdin:
    request = json.loads(line)
    if "ended" in request:
      pid, status = os.waitpid(request["ended"], os.WNOHANG)
      answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
      answer = os.fork()
      if answer == 0:
        _become(request)
    print(json.dumps(answer), flush=True)


def _refuse_network(event: str, arguments: tuple) -> None:
  """An audit hook: no command of the suite may reach another machine."""
  if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
    raise PermissionError(f"a network is used: {event} {arguments[-2:]}")


def _become(request: dict) -> None:
  """Runs an entry point in this process, without a network, and ends it."""
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
    os.dup2(os.open(request[name], flags), number)
  code = 1
  try:
    os.environ.clear()
    os.environ.update(request["environment"])
    # As a process of its own does, which imports all that later.
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
