"""The share of a run's time that the compiled step takes."""

import re
import subprocess
import sys

import pytest

from tests import commands


@pytest.mark.thorough
def test_a_small_run():
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.step_share", *commands.TINY],
    capture_output=True,
    text=True,
    check=False,
    cwd=commands.ROOT,
    env=commands.environment(),
  )
  assert result.returncode == 0, result.stderr
  last = result.stdout.splitlines()[-1]
  found = re.fullmatch(
    r"configs/copy\.py: 4 steps in [\d.]+ s, .* [\d.]+ s: ([\d.]+)%", last
  )
  assert found, result.stdout
  assert float(found[1]) > 0.0
