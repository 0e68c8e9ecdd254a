"""`compare.py status`: what is done, what runs, and for how long."""

import dataclasses
import json
import os
import re
import time
import types

import pytest

from comparison import records, status
from comparison.planned_run import Run
from settings import atomic
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


def test_counts_and_the_time_that_is_left(workdir, monkeypatch):
  folder, runs = workdir
  found = status.text(folder).splitlines()
  assert found[0] == (
    f"{folder}: 6 runs: 2 done, 0 running, 2 waiting, 1 failed, 1 not supported"
  )
  assert found[1] == f"failed   {runs[4].identity}: loss is nan"
  # Two of linear, each as long as dense on average.
  clock = {"time": lambda: 3600.0, "localtime": time.gmtime}
  patched = types.SimpleNamespace(**vars(time) | clock)
  monkeypatch.setattr(status, "time", patched)
  assert "until 01 January, 01:22; without" in status.text(folder)
  assert found[2].startswith("about 0:22 hours left with 1 at a time, until ")
  records.write(folder, runs[2], status=records.DONE, final={}, seconds=60.0)
  assert "about 0:01 hours left" in status.text(folder)


def test_steps_of_a_share_and_of_a_budget(tmp_path):
  shares = [(40, 0.25), (10, 0.26), (10, 0.24), (3, 0.1)]
  assert [records.step_at(*x) for x in shares] == [10, 3, 2, 1]
  run = run_of("dense", 0)
  assert records.steps(tmp_path, run) == 1200
  timed, short = (
    dataclasses.replace(run, budget_seconds=x, steps=0) for x in (51.0, 0.5)
  )
  assert records.steps(tmp_path, timed) is None
  for one in (timed, short):
    records.store_step_cost(tmp_path, one, {"step_seconds": 2.0})
  assert records.steps(tmp_path, timed) == 26  # 25.5 to the even number.
  assert records.steps(tmp_path, short) == 1


def test_only_what_was_trained_counts_as_done(workdir):
  folder, runs = workdir
  records.update(folder, runs[1].identity, status=records.STOPPED_EARLY)
  assert status.missing(folder) == [
    "1 of 6 runs done, 1 failed, 1 stopped early, 1 not supported; the results "
    "below may change."
  ]


def test_what_runs_is_told_with_its_step(workdir):
  folder, runs = workdir
  with records.running(folder, runs[2]):
    found = status.text(folder).splitlines()
    assert found[1] == f"running  {runs[2].identity}: starting"
    log = folder / records.RUNS / runs[2].identity
    log.mkdir(parents=True)
    line = {"step": 300, "split": "train", "seconds": 9}
    (log / metrics.FILE).write_text(json.dumps(line) + "\n")
    found = status.text(folder).splitlines()
    assert "2 done, 1 running, 1 waiting" in found[0]
    assert found[1].endswith(": step 300 of 1200")
  assert "0 running" in status.text(folder)


def test_a_process_that_died_runs_nothing(workdir):
  folder, runs = workdir
  with records.running(folder, runs[2]):
    path = folder / records.RUNNING / f"{runs[2].identity}.json"
    who = atomic.read_json(path)
    assert who["process"] == os.getpid()
    gone = 2**22 + 1  # Above what Linux gives out.
    atomic.write_json(path, who | {"process": gone})
    assert "0 running" in status.text(folder)
    atomic.write_json(path, who | {"process": gone, "host": "another"})
    assert "1 running" in status.text(folder)


def test_the_command(workdir, tmp_path):
  folder, _ = workdir
  code, out, error = commands.run("compare.py", "status", f"--workdir={folder}")
  assert (code, error) == (0, "")
  assert "2 done" in out
  nothing = f"--workdir={tmp_path / 'nothing'}"
  found = commands.run("compare.py", "status", nothing)
  assert "no comparison" in commands.fault(found)


def minutes_left(folder):
  found = re.search(r"about (\d+):(\d+) hours left", status.text(folder))
  return 60 * int(found[1]) + int(found[2])


def at_width(attention, width, seed=0, task="copy"):
  across = {"model.features": width}
  leaves = {"seed": seed, **across}
  return Run(task, attention, attention, seed, leaves, {}, across)


def done(folder, run, minutes):
  records.write(
    folder, run, status=records.DONE, final={}, seconds=60.0 * minutes
  )


def test_a_run_takes_as_long_as_those_at_its_values(tmp_path):
  records.plan(tmp_path, [run_of("dense", 0)])
  assert "no run has finished without" in status.text(tmp_path)
  done(tmp_path, at_width("dense", 16), 10)
  done(tmp_path, at_width("dense", 64), 90)
  done(tmp_path, at_width("lsh", 16), 200)
  for run, minutes in (
    (at_width("dense", 16, seed=1), 10),
    (at_width("dense", 32), 50),  # Those of its mechanism.
    (at_width("linear", 16), 100),  # Those of its task.
    (at_width("dense", 16, task="reverse"), 100),  # Those of any task.
  ):
    (tmp_path / records.PLAN).unlink(missing_ok=True)
    records.plan(tmp_path, [run])
    assert minutes_left(tmp_path) == minutes


def test_a_plan_without_across_is_read(tmp_path):
  first, second = at_width("dense", 16), at_width("dense", 64)
  waiting = at_width("dense", 16, seed=1)
  done(tmp_path, first, 10)
  done(tmp_path, second, 90)
  records.plan(tmp_path, [first, second, waiting])
  path = tmp_path / records.PLAN
  plan = atomic.read_json(path)
  assert plan[waiting.identity].pop("across") == {"model.features": 16}
  for run in (first, second):
    del plan[run.identity]["across"]
  atomic.write_json(path, plan)
  assert minutes_left(tmp_path) == 50
  records.plan(tmp_path, [waiting])
  assert minutes_left(tmp_path) == 10


@pytest.fixture
def announced(tmp_path):
  """Of dense, one run of ten minutes is done and six are to be made."""
  runs = [run_of("dense", seed) for seed in range(7)]
  records.plan(tmp_path, runs)
  done(tmp_path, runs[0], 10)

  def announce(runs, process, host="another"):
    """As `records.running` does; a process of another host counts as alive."""
    folder = tmp_path / records.RUNNING
    folder.mkdir(exist_ok=True)
    for run in runs:
      who = {"host": host, "process": process}
      (folder / f"{run.identity}.json").write_text(json.dumps(who))

  return tmp_path, runs[1:], announce


def trained(folder, run, minutes):
  home = records.run_workdir(folder, run)
  home.mkdir(parents=True)
  line = {"step": 300, "split": "train", "seconds": 60.0 * minutes}
  (home / metrics.FILE).write_text(json.dumps(line) + "\n")


def test_runs_have_what_they_were_trained_behind_them(announced):
  folder, runs, announce = announced
  announce(runs[:4], 7)
  trained(folder, runs[0], 4)  # Runs.
  trained(folder, runs[4], 5)  # Was stopped.
  records.write(folder, runs[4], status=records.STOPPED)
  records.write(folder, runs[5], status=records.TRAINED, seconds=600.0)
  assert minutes_left(folder) == (10 - 4) + 3 * 10 + (10 - 5)
  text = status.text(folder)
  assert "with 1 at a time" in text
  assert "1 done, 4 running, 2 waiting" in text


def test_processes_are_counted_by_machine(announced):
  folder, runs, announce = announced
  announce(runs[:2], 7)
  announce(runs[2:4], 8)
  announce(runs[4:], 8, host="a third")
  assert "with 3 at a time" in status.text(folder)
  assert minutes_left(folder) == 20


def test_what_a_process_has_done_is_not_ahead(announced):
  folder, runs, announce = announced
  announce(runs, 7)
  done(folder, runs[0], 10)
  assert "2 done, 5 running, 0 waiting" in status.text(folder)
  assert minutes_left(folder) == 5 * 10


def test_runs_of_the_report_wait_for_their_point(tmp_path):
  def chosen(attention, seed, rate, choosing):
    run = run_of(attention, seed)
    grid = {"optimizer.learning_rate": rate}
    return dataclasses.replace(
      run, grid=grid, fields=run.fields | grid, choosing=choosing
    )

  choosing = [
    chosen(name, 10_000, rate, True)
    for name in ("dense", "linear")
    for rate in (1e-3, 3e-3)
  ]
  records.plan(tmp_path, choosing, [0, 1])
  assert "8 runs: 0 done, 0 running, 8 waiting" in status.text(tmp_path)
  done(tmp_path, choosing[0], 10)
  records.write(tmp_path, choosing[1], status=records.STOPPED_EARLY)
  # The point of dense is known.
  records.plan(tmp_path, [chosen("dense", x, 1e-3, False) for x in (0, 1)])
  found = status.text(tmp_path)
  assert "8 runs: 1 done, 0 running, 6 waiting, 0 failed, 1 stopped" in found
  assert minutes_left(tmp_path) == 60
  # The same plan again, as by the same command.
  records.plan(tmp_path, choosing, [0, 1])
  assert "8 runs: 1 done, 0 running, 6 waiting" in status.text(tmp_path)


def added(folder):
  return {
    (x["attention"], x["seed"], x["choosing"])
    for x in records.planned_runs(folder).values()
    if x.get(records.ADDED)
  }


def test_seeds_that_were_added_later_are_marked_in_the_plan(tmp_path):
  names = ("dense", "linear")
  first = [run_of(name, seed) for name in names for seed in (0, 1)]
  records.plan(tmp_path, first)
  records.plan(tmp_path, first)  # The same command again.
  records.plan(tmp_path, [run_of("lsh", 0)])  # A row with the planned seeds.
  assert not added(tmp_path)
  records.plan(tmp_path, [*first, run_of("dense", 2)])
  assert added(tmp_path) == {("dense", 2, False)}
  records.plan(tmp_path, [*first, run_of("dense", 2), run_of("linear", 2)])
  assert added(tmp_path) == {(name, 2, False) for name in names}


def test_seeds_behind_a_grid_are_those_of_the_first_plan(tmp_path):
  choosing = [dataclasses.replace(run_of("dense", 10_000), choosing=True)]
  records.plan(tmp_path, choosing, [0, 1])
  records.plan(tmp_path, [run_of("dense", seed) for seed in (0, 1)])
  assert not added(tmp_path)
  records.plan(tmp_path, choosing, [0, 1, 2])
  assert added(tmp_path) == {("dense", 2, False)}
