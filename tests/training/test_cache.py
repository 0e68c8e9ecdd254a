"""What a run leaves outside its folder: one cache, where it is told to be."""

import os
import subprocess
import sys

import pytest

from settings import cache
from tests import commands

_OTHERS = (
  cache.VARIABLE,
  "JAX_COMPILATION_CACHE_DIR",
  "MPLCONFIGDIR",
  "XDG_CACHE_HOME",
  "XDG_CONFIG_HOME",
)
# Nothing is compiled yet in an empty cache, and no number is looked at.
_QUICK = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@pytest.mark.parametrize("moved", [False, True])
def test_one_variable_names_the_folder(moved, monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.delenv(cache.VARIABLE, raising=False)
  expected = tmp_path / "home/.cache/attention-lab"
  if moved:
    expected = tmp_path / "elsewhere"
    monkeypatch.setenv(cache.VARIABLE, str(expected))
  assert cache.folder("xla") == expected / "xla"


@pytest.mark.thorough
def test_a_run_writes_to_its_folder_and_the_cache_alone(tmp_path):
  home, scratch = tmp_path / "home", tmp_path / "scratch"
  home.mkdir()
  scratch.mkdir()
  environment = {
    name: value
    for name, value in commands.environment().items()
    if name not in _OTHERS
  }
  subprocess.run(
    [
      sys.executable,
      "train.py",
      *commands.TINY,
      "--config.num_steps=1",
      f"--workdir={tmp_path / 'run'}",
    ],
    cwd=commands.ROOT,
    env=environment
    | {"HOME": str(home), "TMPDIR": str(scratch), "XLA_FLAGS": _QUICK},
    stdout=subprocess.DEVNULL,
    check=True,
  )
  written = [
    path.relative_to(home) for path in home.rglob("*") if path.is_file()
  ]
  kinds = {path.parts[2] for path in written}
  assert {path.parts[:2] for path in written} == {(".cache", "attention-lab")}
  assert kinds == {"xla", "matplotlib"}
  assert not os.listdir(scratch)
