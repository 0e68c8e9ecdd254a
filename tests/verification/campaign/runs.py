"""Kills, moves and duplicates runs, and takes their disk or memory."""

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests import commands
from tests.test_train import digests, records
from tests.training.test_processes import digests as digests_of_leaves
from tests.training.test_processes import ended, running
from tests.verification.campaign.faults import fault, one_line, require, shell

_SECONDS = 300


def arguments(workdir):
  """Returns the arguments of a run of twelve steps with three checkpoints."""
  return (*commands.TINY, f"--workdir={workdir}")


@functools.cache
def undisturbed_run():
  """Returns the workdir of a run without a fault, and its seconds."""
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="campaign-")) / "undisturbed"
  finish(workdir)  # Compiles.
  shutil.rmtree(workdir)
  start = time.monotonic()
  finish(workdir)
  return workdir, time.monotonic() - start


@functools.cache
def stopped_run():
  """Returns the workdir of the same run, stopped after step 8 of 12."""
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="campaign-")) / "stopped"
  finish(workdir, "--stop_at=8")
  return workdir


def finish(workdir, *more, **options):
  """Runs to the end, or resumes; returns standard output and standard error."""
  with start_run(workdir, *more, **options) as process:
    out, error = process.communicate(timeout=_SECONDS)
  require(process.returncode == 0, f"exit code {process.returncode}", error)
  return out, error


@contextlib.contextmanager
def start_run(workdir, *more, **options):
  """Starts a run, and kills it at the end of the context."""
  process = commands.start("train.py", *arguments(workdir), *more, **options)
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def compare(workdir, expected=None):
  """Requires the same checkpoint and metrics as another run."""
  expected = undisturbed_run()[0] if expected is None else expected
  require(digests(workdir) == digests(expected), "another checkpoint")
  require(records(workdir) == records(expected), "other metrics")


def resume(workdir, **options):
  """Resumes a run, compares it with an undisturbed one, and returns its start."""
  out, _ = finish(workdir, **options)
  compare(workdir)
  _, text, step = out.partition("continues from the checkpoint of step ")
  return f"from step {step.split()[0].rstrip('.,:;')}" if text else "whole"


def wait(process, rng):
  """Waits for a random fraction of the duration of a run."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(rng.uniform(0, 1.1 * undisturbed_run()[1]))


@fault("SIGKILL of one process", 30, "same digests, same lines of metrics")
def killed(rng, folder):
  """Kills a run once or twice, at random moments."""
  for _ in range(rng.integers(1, 3)):
    with start_run(folder / "run") as process:
      wait(process, rng)
  return resume(folder / "run")


@functools.cache
def undisturbed_run_of_two():
  workdir = undisturbed_run()[0].parent / "two"
  with running(2, workdir) as processes:
    codes = [code for code, _, _ in ended(processes)]
  require(codes == [0, 0], codes)
  return workdir


@fault(
  "SIGKILL of one of two processes", 10, "same digests; the other process ends"
)
def one_of_two_killed(rng, folder):
  expected = undisturbed_run_of_two()
  with running(2, folder / "run") as processes:
    victim = processes[rng.integers(2)]
    wait(victim, rng)
    victim.kill()
    # Before they connect, a process waits five minutes for the other.
    if not (folder / "run" / "config.json").exists():
      for process in processes:
        process.kill()
    ended(processes)
  with running(2, folder / "run") as processes:
    results = ended(processes)
  require([code for code, _, _ in results] == [0, 0], results)
  steps = [digests_of_leaves(x, 12) for x in (folder / "run", expected)]
  require(steps[0] == steps[1], "another checkpoint")
  return ""


@fault("SIGTERM, Ctrl-C, SIGSTOP", 20, "saved and ended, or continued")
def signal_run(rng, folder):
  number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGSTOP])
  with start_run(folder / "run") as process:
    wait(process, rng)
    process.send_signal(number)
    if number == signal.SIGSTOP:
      time.sleep(rng.uniform(1, 30))
      process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=_SECONDS)
  codes = [0, 130] if number == signal.SIGINT else [0]
  early = [-number, 128 + number]  # Before Python handles signals.
  require(process.returncode in [*codes, *early], process.returncode, error)
  require("Traceback" not in error or process.returncode in early, error)
  return resume(folder / "run")


@contextlib.contextmanager
def small_disk(folder, size):
  """Mounts a small file system on a folder."""
  folder.mkdir()
  shell("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
  try:
    yield folder
  finally:
    shell("umount", "-l", folder)


@fault(
  "disk full or read-only", 20, "one line; no partial files; the run resumes"
)
def no_disk_space(rng, folder):
  """Fills the disk of a run, or of the compilation cache, which is optional."""
  kind = rng.choice(["full", "read-only", "cache"])
  size = int(rng.integers(1, 120)) * 4096
  with small_disk(folder / "disk", size) as disk:
    if kind == "cache":
      cache = {"JAX_COMPILATION_CACHE_DIR": str(disk)}
      code, _, error = run_process(folder / "run", environment=cache)
      require(code == 0, error)
      compare(folder / "run")
      return "the cache"
    if kind == "read-only":
      with start_run(disk / "run") as process:
        wait(process, rng)
      shell("mount", "-o", "remount,ro", disk)
    code, _, error = run_process(disk / "run")
    if code:
      one_line(code, error)
    shell("mount", "-o", "remount,rw,size=64m", disk)
    return resume(disk / "run")


def run_process(workdir, *more, environment=None, limit=None):
  """Runs with other variables or a memory limit; returns code, output and error."""
  command = [sys.executable, commands.ROOT / "train.py", *arguments(workdir)]
  prefix = [] if limit is None else ["prlimit", f"--as={limit}"]
  done = subprocess.run(
    [*prefix, *map(str, command), *more],
    env=commands.environment() | (environment or {}),
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    check=False,
    timeout=_SECONDS,
  )
  return done.returncode, done.stdout, done.stderr


@fault("no memory", 20, "one line; the run resumes from its checkpoint")
def no_memory(rng, folder):
  """Makes an allocation fail at a random step, or sets sizes too large to fit."""
  if rng.random() < 0.3:
    field = rng.choice(["batch_size", "task.max_length", "model.features"])
    size = 8 * 10 ** int(rng.integers(9, 13))
    code, _, error = run_process(folder / "run", f"--config.{field}={size}")
    line = one_line(code, error, [2])
    require("of memory here" in line, line)
    return "refused"
  (folder / "modules").mkdir()
  (folder / "modules" / "greedy.py").write_text(_GREEDY)
  step = int(rng.integers(0, 12))
  path = os.pathsep.join([str(folder / "modules"), str(commands.ROOT)])
  code, _, error = run_process(
    folder / "run",
    "--config.task.name=greedy:ENTRY",
    environment={"PYTHONPATH": path, "GREEDY_STEP": str(step)},
  )
  line = one_line(code, error)
  require("memory" in line.lower(), line)
  code, out, error = run_process(
    folder / "run",
    "--config.task.name=greedy:ENTRY",
    environment={"PYTHONPATH": path, "GREEDY_STEP": "-1"},
  )
  require(code == 0, error)
  compare(folder / "run")
  return "continued" if "continues from" in out else "restarted"


_GREEDY = """
import os
import jax.numpy as jnp
import tasks
from tasks.copy import CopyConfig, CopyTask

ENTRY = tasks.TaskEntry(CopyConfig, tasks.TASKS["copy"].make)
_train_batch = CopyTask.train_batch

def train_batch(self, step):
  if step == int(os.environ["GREEDY_STEP"]):
    jnp.zeros((2**44,), jnp.float32).block_until_ready()
  return _train_batch(self, step)

CopyTask.train_batch = train_batch
"""


@fault("clock, host and place", 10, "same digests, same lines of metrics")
def move_run(rng, folder):
  """Resumes with another clock and host name, from a link or a moved folder."""
  home = folder / "mit Leerzeichen, ünïcödé und 'Zeichen'"
  home.mkdir()
  modules = folder / "modules"
  modules.mkdir()
  (modules / "sitecustomize.py").write_text(
    "import socket, time\n"
    f"now, shift = time.time, {rng.uniform(-1e7, 1e7)}\n"
    "time.time = lambda: now() + shift\n"
    "socket.gethostname = lambda: 'elsewhere'\n"
  )
  with start_run(home / "run") as process:
    wait(process, rng)
  workdir = folder / "link"
  if rng.random() < 0.5 or not (home / "run").exists():
    workdir.symlink_to(home)
    workdir = workdir / "run"
  else:
    (home / "run").rename(workdir)
  return resume(workdir, path=modules)


@fault("two processes in one workdir", 10, "one waits or is refused")
def two_at_once(rng, folder):
  with start_run(folder / "run") as first:
    time.sleep(rng.uniform(0, undisturbed_run()[1]))
    with start_run(folder / "run") as second:
      results = [
        (x.communicate(timeout=_SECONDS), x.returncode) for x in (first, second)
      ]
  refused = [(code, error) for (_, error), code in results if code]
  require(len(refused) < 2, refused)
  for code, error in refused:
    require("another process" in one_line(code, error), error)
  compare(folder / "run")
  return "one refused" if refused else "one after the other"


@fault("two launchers of a comparison", 5, "one waits or is refused")
def two_launchers(rng, folder):
  launch = (
    "compare.py",
    "--config=configs/compare/copy.py",
    *commands.flags({"attention": "dense,linear", "seeds": 0}),
    *commands.flags({"num_steps": 12}),
    *commands.flags({"model": {"features": 16, "num_layers": 1}}),
    f"--workdir={folder / 'comparison'}",
  )
  first = commands.start(*launch)
  time.sleep(rng.uniform(0, 8))
  second = commands.start(*launch)
  results = [
    (x.communicate(timeout=2 * _SECONDS), x.returncode) for x in (first, second)
  ]
  for (_, error), code in results:
    if code:
      require("another process" in one_line(code, error), error)
  require(0 in [code for _, code in results], results)
  paths = list((folder / "comparison" / "records").glob("*.json"))
  require(len(paths) == 2, f"{len(paths)} records")
  return ""
