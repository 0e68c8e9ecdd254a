"""What other programs take of the machine is told apart from one's own work."""

import multiprocessing
import time

from comparison import usage


def work(seconds):
  end = time.process_time() + seconds
  while time.process_time() < end:
    pass


def test_others_are_seen_and_own_work_is_not():
  meter = usage.Meter()
  work(0.3)
  child = multiprocessing.get_context("spawn").Process(target=work, args=(1.0,))
  child.start()
  child.join()
  elapsed = time.monotonic() - meter._start
  # The machine may be busy with more than the child, never with less.
  seen = meter.others_cores()
  assert seen * elapsed > 0.8
  own = meter.read()["cpu_seconds"]
  assert 0.3 <= own < 0.3 + seen * elapsed


def test_the_machine_is_told():
  found = usage.machine()
  assert len(found["commit"]) == 40
  assert found["cpu"]
  assert found["cores"] >= 1


def test_outside_of_a_repository_there_is_no_commit(monkeypatch, tmp_path):
  monkeypatch.setattr(usage, "__file__", str(tmp_path / "usage.py"))
  assert usage._commit() is None
