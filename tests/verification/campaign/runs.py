"""Faults of a run: it is killed, moved, has no room, no memory, or company."""

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
  """Of a run of twelve steps with three checkpoints."""
  return (*commands.TINY, f"--workdir={workdir}")


@functools.cache
def whole():
  """A run that nothing happened to, and the seconds that it took."""
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="campaign-")) / "whole"
  finish(workdir)  # Compiles.
  shutil.rmtree(workdir)
  start = time.monotonic()
  finish(workdir)
  return workdir, time.monotonic() - start


@functools.cache
def stopped():
  """The same run, ended after step 8 of 12."""
  workdir = pathlib.Path(tempfile.mkdtemp(prefix="campaign-")) / "stopped"
  finish(workdir, "--stop_at=8")
  return workdir


def finish(workdir, *more, **options):
  """Runs or continues it; (output, what it told on standard error)."""
  with started(workdir, *more, **options) as process:
    out, error = process.communicate(timeout=_SECONDS)
  require(process.returncode == 0, f"exit code {process.returncode}", error)
  return out, error


@contextlib.contextmanager
def started(workdir, *more, **options):
  """A process that is killed at the end at the latest."""
  process = commands.start("train.py", *arguments(workdir), *more, **options)
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def compare(workdir, expected=None):
  """Requires the bits of the checkpoint and the lines of metrics of another run."""
  expected = whole()[0] if expected is None else expected
  require(digests(workdir) == digests(expected), "another checkpoint")
  require(records(workdir) == records(expected), "other metrics")


def continued(workdir, **options):
  """Continues a run, compares it with the whole, and says from where it went on."""
  out, _ = finish(workdir, **options)
  compare(workdir)
  _, found, step = out.partition("continues from the checkpoint of step ")
  return f"from step {step.split()[0].rstrip('.,:;')}" if found else "whole"


def wait(process, rng):
  """A random part of the time that a run takes."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(rng.uniform(0, 1.1 * whole()[1]))


@fault("SIGKILL of one process", 30, "same digests, same lines of metrics")
def killed(rng, folder):
  """At up to two random moments."""
  for _ in range(rng.integers(1, 3)):
    with started(folder / "run") as process:
      wait(process, rng)
  return continued(folder / "run")


@functools.cache
def whole_of_two():
  workdir = whole()[0].parent / "two"
  with running(2, workdir) as processes:
    codes = [code for code, _, _ in ended(processes)]
  require(codes == [0, 0], codes)
  return workdir


@fault("SIGKILL of one of two processes", 10, "same digests, the other ends")
def one_of_two_killed(rng, folder):
  expected = whole_of_two()
  with running(2, folder / "run") as processes:
    victim = processes[rng.integers(2)]
    wait(victim, rng)
    victim.kill()
    # Before they have joined, the other waits five minutes for one that is late.
    if not (folder / "run" / "config.json").exists():
      for process in processes:
        process.kill()
    ended(processes)
  with running(2, folder / "run") as processes:
    found = ended(processes)
  require([code for code, _, _ in found] == [0, 0], found)
  steps = [digests_of_leaves(x, 12) for x in (folder / "run", expected)]
  require(steps[0] == steps[1], "another checkpoint")
  return ""


@fault("SIGTERM, Ctrl-C, SIGSTOP", 20, "saved and ended, or gone on")
def signalled(rng, folder):
  number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGSTOP])
  with started(folder / "run") as process:
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
  return continued(folder / "run")


@contextlib.contextmanager
def small_disk(folder, size):
  """A file system of its own in a folder."""
  folder.mkdir()
  shell("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
  try:
    yield folder
  finally:
    shell("umount", "-l", folder)


@fault("disk full or read-only", 20, "one line, nothing half written, goes on")
def no_room(rng, folder):
  """For a run, or for the cache of programs, that it can do without."""
  kind = rng.choice(["full", "read-only", "cache"])
  size = int(rng.integers(1, 120)) * 4096
  with small_disk(folder / "disk", size) as disk:
    if kind == "cache":
      cache = {"JAX_COMPILATION_CACHE_DIR": str(disk)}
      code, _, error = quietly(folder / "run", environment=cache)
      require(code == 0, error)
      compare(folder / "run")
      return "the cache"
    if kind == "read-only":
      with started(disk / "run") as process:
        wait(process, rng)
      shell("mount", "-o", "remount,ro", disk)
    code, _, error = quietly(disk / "run")
    if code:
      one_line(code, error)
    shell("mount", "-o", "remount,rw,size=64m", disk)
    return continued(disk / "run")


def quietly(workdir, *more, environment=None, limit=None):
  """A run with other variables or a limit: (exit code, output, error)."""
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


@fault("no memory", 20, "one line; the run goes on from its checkpoint")
def no_memory(rng, folder):
  """An allocation that fails at a random step, or sizes that no machine holds."""
  if rng.random() < 0.3:
    leaf = rng.choice(["batch_size", "task.max_length", "model.features"])
    size = 8 * 10 ** int(rng.integers(9, 13))
    code, _, error = quietly(folder / "run", f"--config.{leaf}={size}")
    line = one_line(code, error, [2])
    require("of memory here" in line, line)
    return "refused"
  (folder / "plug").mkdir()
  (folder / "plug" / "greedy.py").write_text(_GREEDY)
  step = int(rng.integers(0, 12))
  path = os.pathsep.join([str(folder / "plug"), str(commands.ROOT)])
  code, _, error = quietly(
    folder / "run",
    "--config.task.name=greedy:ENTRY",
    environment={"PYTHONPATH": path, "GREEDY_STEP": str(step)},
  )
  line = one_line(code, error)
  require("memory" in line.lower(), line)
  code, out, error = quietly(
    folder / "run",
    "--config.task.name=greedy:ENTRY",
    environment={"PYTHONPATH": path, "GREEDY_STEP": "-1"},
  )
  require(code == 0, error)
  compare(folder / "run")
  return "continued" if "continues from" in out else "begun again"


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


@fault("clock, host and place", 10, "as if nothing had happened")
def moved(rng, folder):
  """A clock set back, another host's name, odd paths, a link, a moved folder."""
  home = folder / "mit Leerzeichen, ünïcödé und 'Zeichen'"
  home.mkdir()
  plug = folder / "plug"
  plug.mkdir()
  (plug / "sitecustomize.py").write_text(
    "import socket, time\n"
    f"now, shift = time.time, {rng.uniform(-1e7, 1e7)}\n"
    "time.time = lambda: now() + shift\n"
    "socket.gethostname = lambda: 'elsewhere'\n"
  )
  with started(home / "run") as process:
    wait(process, rng)
  there = folder / "link"
  if rng.random() < 0.5 or not (home / "run").exists():
    there.symlink_to(home)
    there = there / "run"
  else:
    (home / "run").rename(there)
  return continued(there, path=plug)


@fault("two processes on one folder", 10, "one waits or is refused")
def two_at_once(rng, folder):
  with started(folder / "run") as one:
    time.sleep(rng.uniform(0, whole()[1]))
    with started(folder / "run") as other:
      found = [
        (x.communicate(timeout=_SECONDS), x.returncode) for x in (one, other)
      ]
  refused = [(code, error) for (_, error), code in found if code]
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
  found = [
    (x.communicate(timeout=2 * _SECONDS), x.returncode) for x in (first, second)
  ]
  for (_, error), code in found:
    if code:
      require("another process" in one_line(code, error), error)
  require(0 in [code for _, code in found], found)
  made = list((folder / "comparison" / "records").glob("*.json"))
  require(len(made) == 2, f"{len(made)} records")
  return ""
