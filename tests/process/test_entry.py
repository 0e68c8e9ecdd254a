"""What `--help` shows, and how soon."""

import subprocess
import sys
import time

import pytest

from tests import commands


@pytest.mark.parametrize(
  ("program", "flag"),
  [
    # The config is not run: that would take a second.
    (("train.py", "--config=configs/copy.py"), "--workdir"),
    (("compare.py",), "--shard"),
    (("generate.py",), "--beam_size"),
    (("-m", "reports.draw_attention"), "--target"),
    (("-m", "benchmarks.scaling"), "--lengths"),
    (("-m", "benchmarks.options"), "--attention"),
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
