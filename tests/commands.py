"""Runs the entry points as users do, on a very small experiment."""

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
  """Returns the fields of a nested config as flags."""
  fields = flatten(config)
  return [f"--config.{name}={value}" for name, value in fields.items()]


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
  """Returns the environment of all commands, with a common compilation cache.

  Commands compile with the options of the test suite.
  """
  count = f"--xla_force_host_platform_device_count={devices}"
  xla_flags = os.environ.get("XLA_FLAGS", "").split()
  xla_flags = [
    flag for flag in xla_flags if not flag.startswith(count.partition("=")[0])
  ]
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": " ".join([*xla_flags, count]),
    "JAX_COMPILATION_CACHE_DIR": str(
      pathlib.Path(tempfile.gettempdir()) / "attention-lab-tests-xla"
    ),
  }


def run(script, *arguments, **options):
  """Runs a script; returns exit code, output and error."""
  process = Fork([str(ROOT / script), *arguments], **options)
  out, error = process.communicate()
  return process.returncode, out, error


def trained(folder, config, **fields):
  """Trains in a new folder and returns the printed lines.

  Args:
    folder: the workdir.
    config: the name of a file in configs/.
    fields: config fields that `flags` accepts.
  """
  code, out, error = run(
    "train.py",
    f"--config=configs/{config}.py",
    *flags(fields),
    f"--workdir={folder}",
  )
  assert (code, error) == (0, ""), error
  return out


def fault(result, code=2):
  """Returns the one-line error of a command, given the result of `run`."""
  exit_code, _, error = result
  assert (exit_code, error.count("\n")) == (code, 1), result
  return error


def assert_picture(path):
  """Asserts that an image is not an empty page."""
  with PIL.Image.open(path) as picture:
    assert np.asarray(picture).std() > 20


def run_module(name, *arguments):
  """Runs `python -m name`; returns exit code, output and error."""
  process = Fork([name, *arguments], is_module=True)
  out, error = process.communicate()
  return process.returncode, out, error


def start(script, *arguments, devices=1, path="", cwd=ROOT):
  """Starts a separate process, which imports everything itself; sets PYTHONPATH."""
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
  """Returns the folder of a finished run of `TINY`, to be read only, and its output."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="attention-lab-finished-"))
  atexit.register(shutil.rmtree, folder)
  code, out, error = run("train.py", *TINY, f"--workdir={folder / 'run'}")
  assert (code, error) == (0, ""), error
  return folder / "run", out


class Fork:
  """An entry point in a fork of `fork_server`, with the methods of `Popen`.

  Args:
    arguments: script or module, and its arguments.
    stdin: text of the standard input.
    devices: the number of devices that JAX sees.
    variables: environment variables, such as PYTHONPATH.
    cwd: the folder in which it starts.
    is_module: whether it runs as `python -m`.
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
    """Returns the exit code, or None while it runs."""
    if self.returncode is None:
      self.returncode = _ask(ended=self.pid)
    return self.returncode

  def wait(self, timeout=300):
    """Waits for the end and returns the exit code."""
    end = time.monotonic() + timeout
    while self.poll() is None:
      if time.monotonic() > end:
        raise subprocess.TimeoutExpired(str(self.pid), timeout)
      time.sleep(0.005)
    return self.returncode

  def communicate(self, timeout=300):
    """Waits for the end and returns output and error."""
    self.wait(timeout)
    return self.stdout.read_text(), self.stderr.read_text()

  def send_signal(self, number):
    """Sends a signal, unless the process has ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self):
    """Kills the process."""
    self.send_signal(9)


@functools.cache
def _server():
  """Starts the `fork_server` of this test worker."""
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
  """Sends a request to `fork_server` and returns its answer."""
  server = _server()
  server.stdin.write(json.dumps(request) + "\n")
  server.stdin.flush()
  return json.loads(server.stdout.readline())
