"""What `--help` shows, and how soon."""

import pathlib
import subprocess
import sys
import time

import pytest

from tests import commands


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
