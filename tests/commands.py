"""Runs the entry points as a user does, on the smallest experiment there is."""

import functools
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
  """One compilation cache for all commands, and none of the suite's devices."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    "JAX_COMPILATION_CACHE_DIR": str(
      pathlib.Path(tempfile.gettempdir()) / "attention-lab-tests-xla"
    ),
  }


def run_module(name, *arguments):
  """Runs `python -m name` to its end: (exit code, output, error)."""
  done = subprocess.run(
    [sys.executable, "-m", name, *arguments],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  return done.returncode, done.stdout, done.stderr


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


def run(script, *arguments, stdin="", **options):
  """Runs a script to its end: (exit code, standard output, standard error)."""
  process = start(script, *arguments, **options)
  out, error = process.communicate(stdin, timeout=300)
  return process.returncode, out, error
