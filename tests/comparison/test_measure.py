"""What is measured again and when, and what other programs take of a machine."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from comparison import measure, plan, records
from comparison.launch import launch
from comparison.measurement import usage
from settings.errors import RunError
from tests.comparison.plans import comparison


@pytest.fixture
def busy(folder, trainer, monkeypatch):
  """Three runs, of which those with seed 1 and 2 were disturbed; others' cores."""
  others = {"cores": 0.0}
  monkeypatch.setattr(
    usage.Meter, "others_cores", lambda meter: others["cores"]
  )
  monkeypatch.setattr(measure, "_WATCH_SECONDS", 0.0)
  one = comparison(tasks="duplicate", attention="dense", seeds="0,1,2")
  runs = plan.plan(one)
  launch(runs, folder, one)
  for run, cores in zip(runs, (0.1, 0.3, 0.3), strict=True):
    measured = records.read_one(folder, run.identity)["measured"]
    spoilt = measured | {"measured_others_cores": cores, "step_seconds": 9.0}
    records.update(folder, run.identity, measured=spoilt)
  trainer.measured.clear()
  trainer.processes.clear()
  return runs, others


def seconds(folder, runs):
  found = (records.read_one(folder, run.identity)["measured"] for run in runs)
  return [measured["step_seconds"] for measured in found]


def test_what_was_disturbed_is_measured_again_in_one_process(
  folder, trainer, busy, capsys
):
  runs, _ = busy
  measure.measure(folder)
  assert trainer.measured == sorted(run.identity for run in runs[1:])
  assert len(trainer.processes) == 1
  assert seconds(folder, runs) == [9.0, 0.5, 0.5]
  assert len(trainer.calls) == 3  # Nothing is trained.
  capsys.readouterr()
  measure.measure(folder)
  assert capsys.readouterr().out.startswith("nothing was measured while others")


def test_what_came_without_its_folder_keeps_what_was_measured(
  folder, trainer, busy, capsys
):
  runs, _ = busy
  shutil.rmtree(records.run_workdir(folder, runs[1]))
  measure.measure(folder)
  told = f"folders are missing in {folder / records.RUNS}: {runs[1].identity}\n"
  assert told in capsys.readouterr().out
  assert seconds(folder, runs) == [9.0, 9.0, 0.5]
  assert not records.read_one(folder, runs[1].identity)["reason"]


def test_a_busy_machine_measures_nothing(folder, trainer, busy):
  runs, others = busy
  others["cores"] = 1.5
  with pytest.raises(RunError, match=r"other programs use 1\.50 cores now"):
    measure.measure(folder)
  assert seconds(folder, runs) == [9.0, 9.0, 9.0]


def test_what_cannot_be_measured_keeps_what_it_has(
  folder, trainer, busy, monkeypatch
):
  def gone(home, **options):
    raise ValueError("no checkpoint")

  runs, _ = busy
  monkeypatch.setattr(
    "comparison.measurement.measurements.measure_trained", gone
  )
  measure.measure(folder)
  assert seconds(folder, runs) == [9.0, 9.0, 9.0]
  assert {records.status(folder, run) for run in runs} == {records.DONE}


def work(seconds):
  end = time.process_time() + seconds
  while time.process_time() < end:
    pass


def test_others_are_seen_and_own_work_and_that_of_a_child_are_not():
  meter = usage.Meter()
  work(0.3)
  script = "import time\nwhile time.process_time() < 0.5: pass"
  child = subprocess.Popen([sys.executable, "-c", script])
  _, _, used = os.wait4(child.pid, 0)
  child.returncode = 0
  elapsed = time.monotonic() - meter._start
  # The machine may be busy with more than the child, never with less.
  seen = meter.others_cores()
  assert seen * elapsed > 0.4
  own = meter.read_child(used)
  assert 0.5 <= own["cpu_seconds"] < 0.5 + seen * elapsed
  assert own["others_cores"] < seen


def test_the_machine_is_told(monkeypatch, tmp_path):
  found = usage.machine()
  assert len(found["commit"]) == 40
  assert found["cpu"]
  assert found["cores"] >= 1
  monkeypatch.setattr(usage, "__file__", str(tmp_path / "usage.py"))
  assert usage._commit() is None  # It is no repository.
