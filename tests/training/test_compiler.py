"""The flag without which XLA:CPU returns garbage: where it is set, and where not."""

import json
import subprocess
import sys

import pytest

from tests import commands
from training import compiler


@pytest.mark.parametrize(
  ("version", "faulty"),
  [
    ("0.9.2", False),
    ("0.10.1", False),
    ("0.10.2", True),
    ("0.11.0", True),
    ("0.12.0", True),
    ("0.12.0.1", True),
    ("0.12.1", False),
    ("0.13.0.dev20270101", False),
  ],
)
def test_versions(version, faulty):
  assert compiler.is_faulty(version) == faulty


@pytest.mark.parametrize(
  ("version", "given", "expected"),
  [
    ("0.10.2", None, f"{compiler.FLAG}="),
    ("0.10.2", "--xla_a=1", f"--xla_a=1 {compiler.FLAG}="),
    ("0.10.2", f"{compiler.FLAG}=X", f"{compiler.FLAG}=X"),
    ("0.10.1", None, None),
  ],
)
def test_the_flag_is_added_unless_it_is_set(
  monkeypatch, version, given, expected
):
  monkeypatch.setattr(compiler.importlib.metadata, "version", lambda _: version)
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  if given is not None:
    monkeypatch.setenv("XLA_FLAGS", given)
  compiler.avoid_faulty_fusion()
  assert compiler.os.environ.get("XLA_FLAGS") == expected


def test_a_run_has_the_flag_and_records_it(tmp_path):
  """Also where it was started without any."""
  environment = commands.environment()
  environment.pop("XLA_FLAGS", None)
  command = [sys.executable, "train.py", *commands.TINY]
  command += ["--config.num_steps=1", f"--workdir={tmp_path}"]
  for _ in range(2):  # The second continues the first.
    subprocess.run(
      command, cwd=commands.ROOT, env=environment, check=True, timeout=300
    )
  written = json.loads((tmp_path / "config.json").read_text())
  needed = compiler.is_faulty(compiler.importlib.metadata.version("jaxlib"))
  assert written["xla_flags"] == (f"{compiler.FLAG}=" if needed else "")
