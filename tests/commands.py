"""Runs the entry points as a user does, on the smallest experiment there is."""

import atexit
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import weakref

import numpy as np
import PIL.Image

from settings.field_values import flatten

ROOT = pathlib.Path(__file__).parent.parent


def flags(config):
  """Leaves of a config, and of its sections, as they are typed."""
  leaves = flatten(config)
  return [f"--config.{name}={value}" for name, value in leaves.items()]


SMALL = {"num_layers": 1, "num_heads": 2, "features": 8, "mlp_features": 8}
TINY = (
  "--config=configs/copy.py",
  *flags({"num_steps": 12, "batch_size": 8, "log_every": 2}),
  *flags({"eval_every": 4, "checkpoint_every": 4}),
  *flags({"task": {"vocab_size": 4, "max_length": 3, "eval_size": 12}}),
  *flags({"model": SMALL | {"dropout_rate": 0.1}}),
)


@functools.cache
def environment(devices=1):
  """One compilation cache for all commands, and devices of their own.

  They compile as the suite does: quickly where `make test` asks for it.
  """
  count = f"--xla_force_host_platform_device_count={devices}"
  others = os.environ.get("XLA_FLAGS", "").split()
  others = [
    flag for flag in others if not flag.startswith(count.partition("=")[0])
  ]
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": " ".join([*others, count]),
    "JAX_COMPILATION_CACHE_DIR": str(
      pathlib.Path(tempfile.gettempdir()) / "attention-lab-tests-xla"
    ),
  }


def run(script, *arguments, **options):
  """Runs a script to its end: (exit code, output, error)."""
  process = Fork([str(ROOT / script), *arguments], **options)
  out, error = process.communicate()
  return process.returncode, out, error


def trained(folder, config, **leaves):
  """Trains in a new folder to the end, and returns what was printed.

  Args:
    folder: of the run.
    config: its name in configs/.
    leaves: of the config, as `flags` takes them.
  """
  code, out, error = run(
    "train.py",
    f"--config=configs/{config}.py",
    *flags(leaves),
    f"--workdir={folder}",
  )
  assert (code, error) == (0, ""), error
  return out


def fault(found, code=2):
  """The one line by which a command was refused; `found` is of `run`."""
  assert (found[0], found[2].count("\n")) == (code, 1), found
  return found[2]


def assert_picture(path):
  """An image that is more than an empty page."""
  with PIL.Image.open(path) as drawn:
    assert np.asarray(drawn).std() > 20


def run_module(name, *arguments):
  """Runs `python -m name` to its end: (exit code, output, error)."""
  process = Fork([name, *arguments], is_module=True)
  out, error = process.communicate()
  return process.returncode, out, error


def start(script, *arguments, devices=1, path="", cwd=ROOT):
  """Starts a process of its own that imports all it needs; `path` for PYTHONPATH."""
  return subprocess.Popen(
    [sys.executable, str(ROOT / script), *arguments],
    cwd=cwd,
    env=environment(devices) | ({"PYTHONPATH": str(path)} if path else {}),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@functools.cache
def finished():
  """The folder of a run of `TINY`, not to be written to, and what it printed."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="attention-lab-finished-"))
  atexit.register(shutil.rmtree, folder)
  code, out, error = run("train.py", *TINY, f"--workdir={folder / 'run'}")
  assert (code, error) == (0, ""), error
  return folder / "run", out


class Fork:
  """An entry point in a fork of `fork_server`, as a `subprocess.Popen`.

  Args:
    arguments: script or module, and what was typed behind it.
    stdin: text of the standard input.
    devices: that JAX sees.
    variables: of its environment, as PYTHONPATH.
    cwd: folder that it starts in.
    is_module: as `python -m`.
  """

  def __init__(
    self,
    arguments,
    *,
    stdin="",
    devices=1,
    variables=None,
    cwd=ROOT,
    is_module=False,
  ):
    folder = tempfile.mkdtemp(prefix="attention-lab-fork-")
    weakref.finalize(self, shutil.rmtree, folder)
    files = {
      name: pathlib.Path(folder, name) for name in ("stdin", "stdout", "stderr")
    }
    files["stdin"].write_text(stdin)
    for path in files.values():  # The fork opens them later.
      path.touch()
    self.stdout, self.stderr = files["stdout"], files["stderr"]
    self.returncode = None
    self.pid = _ask(
      arguments=arguments,
      is_module=is_module,
      folder=str(cwd),
      environment=environment(devices) | (variables or {}),
      **{name: str(path) for name, path in files.items()},
    )

  def poll(self):
    """The exit code, or None while it runs."""
    if self.returncode is None:
      self.returncode = _ask(ended=self.pid)
    return self.returncode

  def wait(self, timeout=300):
    """The exit code at its end."""
    end = time.monotonic() + timeout
    while self.poll() is None:
      if time.monotonic() > end:
        raise subprocess.TimeoutExpired(str(self.pid), timeout)
      time.sleep(0.005)
    return self.returncode

  def communicate(self, timeout=300):
    """Output and error, at its end."""
    self.wait(timeout)
    return self.stdout.read_text(), self.stderr.read_text()

  def send_signal(self, number):
    """Of a process that may have ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self):
    """At once."""
    self.send_signal(9)


@functools.cache
def _server():
  """This worker's `fork_server`, for as long as the worker runs."""
  server = subprocess.Popen(
    [sys.executable, "-m", "tests.fork_server"],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  atexit.register(server.communicate)
  return server


def _ask(**request):
  """What `fork_server` answers."""
  server = _server()
  server.stdin.write(json.dumps(request) + "\n")
  server.stdin.flush()
  return json.loads(server.stdout.readline())
