"""Real processes on this machine are one run, and what happens to one of them."""

import contextlib
import json
import random
import re
import signal
import socket
import threading
import time
import types

import pytest

from tests import commands
from training.devices import cluster

_SECONDS = 240
# What JAX's transport prints, a word at a time and from two threads at once.
_GLOO = re.compile(
  r"(\[Gloo\]|Rank|is connected to|Expected number of connected"
  r"|peer ranks|is|[\d.: ])*"
)


def free_port():
  with socket.socket() as server:
    server.bind(("localhost", 0))
    return server.getsockname()[1]


@contextlib.contextmanager
def running(count, workdir, *arguments, devices=2, last=()):
  """Processes of one run, killed at the end; the last has further arguments."""
  port = free_port()
  several = (f"--coordinator=localhost:{port}", f"--num_processes={count}")
  processes = [
    commands.Fork(
      [
        "train.py",
        *commands.TINY,
        f"--workdir={workdir}",
        *several,
        f"--process_id={i}",
        *arguments,
        *(last if i == count - 1 else ()),
      ],
      devices=devices,
    )
    for i in range(count)
  ]
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.wait()


def ended(processes):
  """(exit code, output, error) of each, without the lines of JAX's transport."""
  found = []
  for process in processes:
    out, error = process.communicate(timeout=_SECONDS)
    own = [line for line in out.splitlines() if not _GLOO.fullmatch(line)]
    found.append((process.returncode, "\n".join(own), error))
  return found


def records(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def assert_same(found, expected):
  """Metrics but for the time they took."""
  clock = {"seconds", "tokens_per_second"}
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys()
    for name in one.keys() - clock:
      value = other[name]
      if not isinstance(value, str):
        value = pytest.approx(value, rel=2e-4, abs=2e-4)
      assert one[name] == value, name


@pytest.fixture
def alone():
  """The same run in one process, with one device."""
  return records(commands.finished()[0])


def test_two_processes_are_one_run(alone, tmp_path):
  """With parameters in parts that lie in both; one is told to stop, and all save."""
  workdir = tmp_path / "run"
  with running(2, workdir, "--config.mesh.fsdp=4") as processes:
    _wait_for(workdir, 2)
    processes[1].send_signal(signal.SIGTERM)
    (first, out, _), (second, silent, _) = ended(processes)
  assert (first, second) == (0, 0)
  assert "12 steps of 8 rows, 4 × cpu" in out
  assert silent == ""
  # It may have been done before it heard.
  if "stopped and saved at step" in out:
    with running(2, workdir, "--config.mesh.fsdp=4") as processes:
      (first, out, _), (second, _, _) = ended(processes)
    assert (first, second) == (0, 0)
    assert "continues from the checkpoint of step" in out
  assert_same(records(workdir), alone)
  for name in ("config.json", "samples.txt", "attention.png", "vocabulary"):
    assert (workdir / name).exists()
  (saved,) = (workdir / "checkpoints").glob("12/state")
  parts = [f.parent.parent.name for f in saved.glob("ocdbt.process_*/d/*")]
  assert set(parts) == {"ocdbt.process_0", "ocdbt.process_1"}


def digests(workdir, step):
  """Of the leaves of a checkpoint."""
  (record,) = (workdir / "checkpoints" / str(step)).rglob("record/metadata")
  return json.loads(record.read_text())["digests"]


@pytest.mark.thorough
def test_one_is_killed(tmp_path):
  """The other ends by itself, and the same command continues the run.

  It ends with every bit of a run that nothing happened to.
  """
  arguments = (
    *("--config.num_steps=400", "--config.checkpoint_every=20"),
    *("--config.eval_every=400", "--config.log_every=1"),
    *("--config.mesh.fsdp=2", "--config.mesh.data=2"),
  )
  whole, workdir = tmp_path / "whole", tmp_path / "run"
  with running(2, whole, *arguments) as processes:
    assert [code for code, _, _ in ended(processes)] == [0, 0]
  with running(2, workdir, *arguments) as processes:
    _wait_for(workdir, random.randrange(30, 200))
    processes[1].kill()
    start = time.monotonic()
    (code, _, error), _ = ended(processes)
    assert time.monotonic() - start < 120
  assert code != 0
  # The network may tell before a minute of silence does.
  silent, told = "process 1 of 2 is lost", "another process of this run is lost"
  assert silent in error or told in error
  assert error.count("\n") == 1
  with running(2, workdir, *arguments) as processes:
    found = ended(processes)
  assert [code for code, _, _ in found] == [0, 0]
  assert "continues from the checkpoint of step" in found[0][1]
  assert digests(workdir, 400) == digests(whole, 400)


def test_processes_with_different_configs_end(tmp_path):
  """Each would update its copy of the parameters with its own rate."""
  workdir = tmp_path / "run"
  with running(
    2, workdir, last=["--config.optimizer.learning_rate=0.5"]
  ) as both:
    found = ended(both)
  assert [code for code, _, _ in found] == [2, 2]
  assert all(error.startswith("config: differs") for _, _, error in found)
  assert not workdir.exists()


def test_a_silent_process_is_named(tmp_path):
  """One counts on, one is done, one is silent."""
  stop, found = threading.Event(), []
  for number, text in ((1, "7 0"), (2, "done"), (3, "8 0")):
    (tmp_path / str(number)).write_text(text)

  def beat():
    for i in range(100):
      (tmp_path / "1").write_text(f"7 {i}")
      if stop.wait(0.02):
        return

  thread = threading.Thread(target=beat)
  thread.start()
  cluster.watch(
    [tmp_path / str(number) for number in range(4)],
    index=0,
    stop=stop,
    on_lost=found.append,
    every=0.02,
    limit=0.3,
  )
  stop.set()
  thread.join()
  assert found == [3]


def test_a_pause_of_this_process_is_no_silence_of_another(
  tmp_path, monkeypatch
):
  """Checks at 1, 2, 3 s, then after a pause of a minute; 5 s of silence count."""
  times = [0.0, 1, 2, 3, 63, 64, 65, 66, 67, 68, 69, 70, 71]
  for own, limit, ends in ((0, 5, 69), (0, 6, 70), (1, 5, None)):
    ticks = iter(times)
    clock = types.SimpleNamespace(monotonic=lambda ticks=ticks: next(ticks))
    monkeypatch.setattr(cluster, "time", clock)
    files = [tmp_path / "own", tmp_path / "other"]
    files[1 - own].write_text("7" if own == 0 else "done")
    waits = iter([False] * (len(times) - 1) + [True])
    stop = types.SimpleNamespace(wait=lambda _, waits=waits: next(waits))
    found = []
    cluster.watch(files, own, stop, found.append, every=1.0, limit=limit)
    assert found == ([] if ends is None else [1])
    left = len([*ticks])
    assert left == (0 if ends is None else len(times) - 1 - times.index(ends))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--num_processes=2"], "--coordinator: missing; a run of several"),
    (
      ["--coordinator=x", "--num_processes=2", "--process_id=0"],
      "--coordinator: expected HOST:PORT, got 'x'",
    ),
    (
      ["--coordinator=x:1", "--num_processes=2", "--process_id=2"],
      "--process_id: expected 0 to 1, for --num_processes=2, got 2",
    ),
  ],
)
def test_flags_that_do_not_go_together(arguments, message):
  code, _, error = commands.run("train.py", *commands.TINY, *arguments)
  assert code == 2
  assert error.startswith(message)
  assert error.count("\n") == 1


def _wait_for(workdir, step):
  """Returns once the run has written that step."""
  end = time.monotonic() + _SECONDS
  while time.monotonic() < end:
    path = workdir / "metrics.jsonl"
    if path.exists() and any(r["step"] >= step for r in _whole(path)):
      return
    time.sleep(0.1)
  raise AssertionError(f"step {step} was not reached")


def _whole(path):
  lines = path.read_text().splitlines(keepends=True)
  return [json.loads(line) for line in lines if line.endswith("\n")]


def test_one_process_does_not_differ_from_itself():
  assert cluster.differs("x") is False
