"""The flag without which XLA:CPU returns garbage: where it is set, and where not."""

import ast
import json
import os
import subprocess
import sys

import pytest

from attention.platform.backend import FUSION_FLAG, has_faulty_fusion
from configs import copy
from tests import commands
from training import experiment_config, workdir
from training.devices import process


@pytest.mark.parametrize(
  ("version", "given", "expected"),
  [
    ("0.10.2", None, f"{FUSION_FLAG}="),
    ("0.10.2", "--xla_a=1", f"--xla_a=1 {FUSION_FLAG}="),
    ("0.10.2", f"{FUSION_FLAG}=X", f"{FUSION_FLAG}=X"),
    ("0.10.1", None, None),
  ],
)
def test_the_flag_is_added_unless_it_is_set(
  monkeypatch, version, given, expected
):
  monkeypatch.setattr(process.importlib.metadata, "version", lambda _: version)
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  if given is not None:
    monkeypatch.setenv("XLA_FLAGS", given)
  process.avoid_faulty_fusion()
  assert process.os.environ.get("XLA_FLAGS") == expected


def first_import(file):
  """The first package of this project that a file imports."""
  for node in ast.parse((commands.ROOT / file).read_text("utf-8")).body:
    match node:
      case ast.Import(names=[ast.alias(name=name)]):
        pass
      case ast.ImportFrom(module=str(name)):
        pass
      case _:
        continue
    if (commands.ROOT / name.partition(".")[0]).is_dir():
      return name.partition(".")[0]
  return None


def test_every_program_has_the_flag():
  """Their first import sets it, also where they are started without any."""
  programs = "train.py", "compare.py", "generate.py", "swap.py"
  for file in (*programs, "comparison/__init__.py"):
    assert first_import(file) == "training", file
  assert first_import("lab.py") == "comparison"
  run = "import training, attention, os; print(os.environ.get('XLA_FLAGS', ''))"
  done = subprocess.run(
    [sys.executable, "-c", run],
    cwd=commands.ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    capture_output=True,
    text=True,
    check=True,
  )
  needed = has_faulty_fusion(process.importlib.metadata.version("jaxlib"))
  assert done.stdout == (f"{FUSION_FLAG}=\n" if needed else "\n")
  assert done.stderr == ""


def test_a_run_records_the_flags(tmp_path, monkeypatch):
  """Those that it began with, and it goes on with others."""
  config = experiment_config.parse(copy.get_config())
  process.devices()  # XLA reads its flags once, and stops at one without meaning.
  monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
  workdir.write_config(tmp_path, config)
  written = json.loads((tmp_path / workdir.CONFIG).read_text())
  assert written["xla_flags"] == "--xla_a=1"
  monkeypatch.setenv("XLA_FLAGS", "--xla_a=2")
  workdir.check(tmp_path, config)
