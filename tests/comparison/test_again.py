"""Rows of docs/results.md, trained again here, come out with the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from comparison import archive
from comparison.usage import machine

_ROOT = pathlib.Path(__file__).parents[2]
_ON_ONE_CORE = """
import os, runpy, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, "")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_RECORDS = _ROOT / "docs" / "results" / "parity.jsonl.xz"


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["dense", "stick_breaking"])
def test_a_row_again(attention, tmp_path):
  """On the processor and the jax of the record; with one core, as it was run."""
  _, found = archive.read(_RECORDS)
  record = next(
    x for x in found.values() if (x["attention"], x["seed"]) == (attention, 0)
  )
  here, there = machine(), record["machine"]
  if (here["cpu"], jax.__version__) != (there["cpu"], there["jax"]):
    pytest.skip("another processor or another jax computes other bits")
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  arguments = [*record["arguments"], f"--workdir={tmp_path}"]
  subprocess.run(
    [sys.executable, "-c", _ON_ONE_CORE, "train.py", *arguments],
    cwd=_ROOT,
    env=environment | {"OMP_NUM_THREADS": "1"},
    check=True,
  )
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  timed = {"seconds", "tokens_per_second"}
  again, before = (
    [{k: v for k, v in line.items() if k not in timed} for line in history]
    for history in (map(json.loads, lines), record["history"])
  )
  assert again == before
