"""`compare.py status`: what is done, what runs, and for how long."""

import json
import os

import pytest

from comparison import records, status
from comparison.plan import Run
from tests import commands
from training import metrics


def run_of(attention, seed):
  return Run("copy", attention, attention, seed, {"seed": seed}, {}, steps=1200)


@pytest.fixture
def workdir(tmp_path):
  """Dense is done, linear runs and waits, one failed and one cannot be."""
  runs = [run_of(name, seed) for name in ("dense", "linear") for seed in (0, 1)]
  runs += [run_of("lsh", 0), run_of("linformer", 0)]
  (tmp_path / records.COMPARISON).write_text("{}")
  records.plan(tmp_path, runs)
  for seed, run in enumerate(runs[:2]):
    records.write(
      tmp_path, run, status=records.DONE, final={}, seconds=600.0 + 120 * seed
    )
  records.write(tmp_path, runs[4], status=records.FAILED, reason="loss is nan")
  records.write(tmp_path, runs[5], status=records.UNSUPPORTED)
  return tmp_path, runs


def test_counts_and_the_time_that_is_left(workdir):
  folder, runs = workdir
  found = status.text(folder).splitlines()
  assert found[0] == (
    f"{folder}: 6 runs: 2 done, 0 running, 2 waiting, 1 failed, 1 not supported"
  )
  assert found[1] == f"failed   {runs[4].identity}: loss is nan"
  # Two of linear, each as long as dense on average.
  assert found[2].startswith("about 0:22 hours left with 1 at a time, until ")
  records.write(folder, runs[2], status=records.DONE, final={}, seconds=60.0)
  assert "about 0:01 hours left" in status.text(folder)


def test_what_runs_is_told_with_its_step(workdir):
  folder, runs = workdir
  with records.running(folder, runs[2]):
    found = status.text(folder).splitlines()
    assert found[1] == f"running  {runs[2].identity}: begins"
    log = folder / records.RUNS / runs[2].identity
    log.mkdir(parents=True)
    (log / metrics.FILE).write_text(json.dumps({"step": 300}) + "\n")
    found = status.text(folder).splitlines()
    assert "2 done, 1 running, 1 waiting" in found[0]
    assert found[1].endswith(": step 300 of 1200")
  assert "0 running" in status.text(folder)


def test_a_process_that_died_runs_nothing(workdir):
  folder, runs = workdir
  with records.running(folder, runs[2]):
    path = folder / records.RUNNING / f"{runs[2].identity}.json"
    who = json.loads(path.read_text())
    assert who["process"] == os.getpid()
    gone = 2**22 + 1  # Above what Linux gives out.
    path.write_text(json.dumps(who | {"process": gone}))
    assert "0 running" in status.text(folder)
    path.write_text(json.dumps(who | {"process": gone, "host": "another"}))
    assert "1 running" in status.text(folder)


def test_nobody_knows_before_the_first_is_done(tmp_path):
  records.plan(tmp_path, [run_of("dense", 0)])
  assert "no run is done yet" in status.text(tmp_path)


def test_the_command(workdir, tmp_path):
  folder, _ = workdir
  code, out, error = commands.run("compare.py", "status", f"--workdir={folder}")
  assert (code, error) == (0, "")
  assert "2 done" in out
  code, _, error = commands.run(
    "compare.py", "status", f"--workdir={tmp_path / 'nothing'}"
  )
  assert code == 2
  assert "no comparison" in error
