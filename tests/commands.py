"""Runs the entry points as a user does, on the smallest experiment there is."""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent

TINY = (
  "--config=configs/copy.py",
  "--config.num_steps=12",
  "--config.batch_size=8",
  "--config.log_every=2",
  "--config.eval_every=4",
  "--config.checkpoint_every=4",
  "--config.task.vocab_size=4",
  "--config.task.max_length=3",
  "--config.task.eval_size=12",
  "--config.model.num_layers=1",
  "--config.model.num_heads=2",
  "--config.model.features=8",
  "--config.model.mlp_features=8",
  "--config.model.dropout_rate=0.1",
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


def run_module(name, *arguments):
  """Runs `python -m name` to its end: (exit code, output, error)."""
  return _fork([name, *arguments], is_module=True)


def start(script, *arguments, devices=1, path="", cwd=ROOT, **options):
  """Starts a script with its output captured as text; `path` for PYTHONPATH."""
  return subprocess.Popen(
    [sys.executable, str(ROOT / script), *arguments],
    cwd=cwd,
    env=environment(devices) | ({"PYTHONPATH": str(path)} if path else {}),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )


def run(script, *arguments, stdin="", devices=1, **options):
  """Runs a script to its end: (exit code, standard output, standard error)."""
  if options:  # Such as a folder that Python searches from its start.
    process = start(script, *arguments, devices=devices, **options)
    out, error = process.communicate(stdin, timeout=300)
    return process.returncode, out, error
  return _fork([str(ROOT / script), *arguments], stdin=stdin, devices=devices)


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


def _fork(arguments, stdin="", devices=1, is_module=False):
  """Runs an entry point in a fork: (exit code, output, error)."""
  with tempfile.TemporaryDirectory() as folder:
    files = {
      name: pathlib.Path(folder, name) for name in ("stdin", "stdout", "stderr")
    }
    files["stdin"].write_text(stdin)
    request = {
      "arguments": arguments,
      "is_module": is_module,
      "folder": str(ROOT),
      "environment": environment(devices),
      **{name: str(path) for name, path in files.items()},
    }
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    out, error = (files[n].read_text() for n in ("stdout", "stderr"))
  return code, out, error
