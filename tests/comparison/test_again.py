"""Rows of docs/results.md, trained again by their command, go the same way."""

import json
import pathlib
import subprocess
import sys

import pytest

from comparison import archive

_ROOT = pathlib.Path(__file__).parents[2]
_RECORDS = _ROOT / "docs" / "results" / "parity.jsonl.xz"


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["dense", "stick_breaking"])
def test_a_row_again(attention, tmp_path):
  """To the first line of its record; later ones amplify how sums are rounded."""
  _, found = archive.read(_RECORDS)
  record = next(
    x for x in found.values() if (x["attention"], x["seed"]) == (attention, 0)
  )
  first = record["history"][0]
  stop = f"--stop_at={first['step']}"
  arguments = [*record["arguments"], f"--workdir={tmp_path}", stop]
  subprocess.run(
    [sys.executable, "train.py", *arguments], cwd=_ROOT, check=True
  )
  line, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
  again = json.loads(line)
  assert again["loss"] == pytest.approx(first["loss"], rel=1e-3)
  assert again["grad_norm"] == pytest.approx(first["grad_norm"], rel=2e-2)
  assert again["learning_rate"] == pytest.approx(
    first["learning_rate"], rel=1e-4
  )
