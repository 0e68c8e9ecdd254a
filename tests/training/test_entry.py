"""What `--help` shows, and how a program ends."""

import errno
import pathlib
import subprocess
import sys

import pytest

from tests import commands
from training.commands import entry

# Runs `--help`.
_HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
if sys.argv[0].endswith(".py"):
  runpy.run_path(sys.argv[0], run_name="__main__")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
  ("program", "flag"),
  [
    ("train.py", "--workdir"),
    ("compare.py", "--shard"),
    ("generate.py", "--beam_size"),
    ("training.commands.draw_attention", "--target"),
    ("benchmarks.scaling", "--lengths"),
  ],
)
def test_help_is_examples_and_own_flags(program, flag):
  result = subprocess.run(
    [sys.executable, "-c", _HELP, program],
    capture_output=True,
    text=True,
    check=True,
    cwd=commands.ROOT,
  )
  assert not result.stderr
  described, shown = result.stdout.split("\nFlags:\n")
  assert sum(program in line for line in described.splitlines()) >= 3
  assert f"  {flag}\n" in shown
  assert "(default" in shown or program in (
    "train.py",
    "training.commands.draw_attention",
  )
  assert "--helpfull" in shown.splitlines()[-1]
  # None of absl's own.
  assert "verbosity" not in result.stdout


@pytest.mark.parametrize(
  ("program", "config", "platform"),
  [
    ("train.py", "configs/copy.py", "cuda"),
    ("compare.py", "configs/compare/copy.py", "nosuch"),
  ],
)
def test_a_device_that_is_not_there_is_one_line(
  program, config, platform, tmp_path
):
  if platform == "cuda" and pathlib.Path("/dev/nvidia0").exists():
    pytest.skip("this machine has one")
  code, _, error = commands.run(
    program,
    f"--config={config}",
    f"--workdir={tmp_path / 'run'}",
    variables={"JAX_PLATFORMS": platform},
  )
  assert code == 2
  assert error.startswith(
    f"JAX_PLATFORMS: expected a device that this machine has, got '{platform}'"
  )
  assert error.count("\n") == 1
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
    (OSError(errno.EDQUOT, "", "x"), "Disk quota exceeded (x); make room"),
    (OSError(errno.EACCES, "", "x"), "Permission denied (x); allow this user"),
    (OSError(errno.EPERM, "", "x"), "Operation not permitted (x); allow this"),
    (MemoryError("9 GiB"), "lower config.batch_size"),
    (RuntimeError("RESOURCE_EXHAUSTED: 64 TiB"), "accumulate_steps"),
  ],
)
def test_no_room_is_one_line_with_a_remedy(error, words):
  line = entry._exhausted(_raised(ValueError("outer"), error))
  assert words in line
  assert "continues from the last checkpoint" in line
  assert "\n" not in line


def test_other_errors_keep_their_traceback():
  for error in (ValueError("shape"), FileNotFoundError(2, "no file", "x")):
    assert not entry._exhausted(_raised(KeyError("a"), error))


def test_threads_tell_all_but_want_of_room():
  program = """
import threading
from training.commands import entry
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
