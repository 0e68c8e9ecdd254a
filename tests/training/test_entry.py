"""What `--help` shows, and how soon."""

import errno
import pathlib
import subprocess
import sys
import time

import pytest

from tests import commands
from training import entry


@pytest.mark.parametrize(
  ("program", "flag"),
  [
    (("train.py",), "--workdir"),
    (("compare.py",), "--shard"),
    (("generate.py",), "--beam_size"),
    (("-m", "training.draw_attention"), "--target"),
    (("-m", "benchmarks.scaling"), "--lengths"),
  ],
)
def test_help_is_examples_and_own_flags(program, flag):
  started = time.monotonic()
  result = subprocess.run(
    [sys.executable, *program, "--help"],
    capture_output=True,
    text=True,
    check=True,
    cwd=commands.ROOT,
  )
  assert time.monotonic() - started < 5  # 0.2 s on a quiet machine.
  assert not result.stderr
  described, shown = result.stdout.split("\nFlags:\n")
  name = program[0] if program[0] != "-m" else program[1]
  assert sum(name in line for line in described.splitlines()) >= 3
  assert f"  {flag}\n" in shown
  assert "(default" in shown or name == "train.py" or "draw" in name
  assert "--helpfull" in shown.splitlines()[-1]
  # None of absl's own.
  assert "verbosity" not in result.stdout


@pytest.mark.parametrize(
  ("program", "config", "platform"),
  [
    ("train.py", "configs/copy.py", "cuda"),
    ("compare.py", "configs/compare/copy.py", "nosuch"),
    pytest.param(
      "train.py", "configs/copy.py", "nosuch", marks=pytest.mark.thorough
    ),
    pytest.param(
      "compare.py",
      "configs/compare/copy.py",
      "cuda",
      marks=pytest.mark.thorough,
    ),
  ],
)
def test_a_device_that_is_not_there_is_one_line(
  program, config, platform, tmp_path
):
  if platform == "cuda" and pathlib.Path("/dev/nvidia0").exists():
    pytest.skip("this machine has one")
  result = subprocess.run(
    [
      sys.executable,
      program,
      f"--config={config}",
      f"--workdir={tmp_path / 'run'}",
    ],
    capture_output=True,
    text=True,
    cwd=commands.ROOT,
    env=commands.environment() | {"JAX_PLATFORMS": platform},
  )
  assert result.returncode == 2
  assert result.stderr.startswith(
    f"JAX_PLATFORMS: expected a device that this machine has, got '{platform}'"
  )
  assert result.stderr.count("\n") == 1
  assert not (tmp_path / "run").exists()


def _raised(error, cause=None):
  """An error as it is caught, with its cause."""
  try:
    raise error from cause
  except Exception as caught:
    return caught


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (OSError(errno.ENOSPC, "none", "run/x"), "No space left on device (run/x)"),
    (
      ValueError("UNKNOWN; os_error_code='28'"),
      "No space left on device; make",
    ),
    (
      _raised(RuntimeError("save"), OSError(errno.EROFS, "no", "run/x")),
      "Read-only file system (run/x); allow",
    ),
    (MemoryError("9 GiB"), "lower config.batch_size"),
    (RuntimeError("RESOURCE_EXHAUSTED: 64 TiB"), "accumulate_steps"),
  ],
)
def test_no_room_is_one_line_with_a_remedy(error, words):
  line = entry._exhausted(_raised(ValueError("outer"), error))
  assert words in line
  assert "goes on from the last checkpoint" in line
  assert "\n" not in line


def test_other_errors_keep_their_traceback():
  for error in (ValueError("shape"), FileNotFoundError(2, "no file", "x")):
    assert not entry._exhausted(_raised(KeyError("a"), error))


def test_threads_tell_all_but_want_of_room():
  program = """
import threading
from training import entry
def main():
  def end(error):
    def body():
      raise error
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
  class Callback:
    def __del__(self):
      raise RuntimeError("Event loop is closed")
  Callback()
  end(OSError(28, "full"))
  end(ValueError("a fault of the thread"))
entry.run(main)
"""
  result = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    cwd=commands.ROOT,
  )
  assert result.returncode == 0, result.stderr
  assert "full" not in result.stderr
  assert "closed" not in result.stderr
  assert "ValueError: a fault of the thread" in result.stderr
