"""The flag without which XLA:CPU returns garbage: where it is set, and where not."""

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


# Forks, so that the libraries of all programs are imported once.
_IMPORT_EACH = """
import importlib, os, sys, warnings
import flax.linen, jax, optax, orbax.checkpoint, pandas, scipy.stats
warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
for name in sys.argv[1:]:
  if os.fork() == 0:
    importlib.import_module(name)
    print(name, os.environ.get("XLA_FLAGS", ""), flush=True)
    os._exit(0)
  os.wait()
"""


def test_every_program_has_the_flag():
  """Also where it was started without any."""
  programs = ["train", "compare", "generate", "swap", "lab"]
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [sys.executable, "-c", _IMPORT_EACH, *programs],
    cwd=commands.ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  needed = has_faulty_fusion(process.importlib.metadata.version("jaxlib"))
  flag = f"{FUSION_FLAG}=" if needed else ""
  assert done.stdout == "".join(f"{name} {flag}\n" for name in programs)
  assert "RuntimeWarning" not in done.stderr


def test_a_run_records_the_flags(tmp_path, monkeypatch):
  """Those that it began with, and it goes on with others."""
  config = experiment_config.parse(copy.get_config())
  monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
  workdir.write_config(tmp_path, config)
  written = json.loads((tmp_path / workdir.CONFIG).read_text())
  assert written["xla_flags"] == "--xla_a=1"
  monkeypatch.setenv("XLA_FLAGS", "--xla_a=2")
  workdir.check(tmp_path, config)
