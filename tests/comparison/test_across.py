"""Values that every mechanism is run with, each a row of its own."""

import dataclasses
import json

import pytest

from comparison import config, plan, records
from comparison import folder as folder_lib
from comparison.planned_run import Run
from settings.errors import ConfigError
from tests.comparison.plans import comparison

WIDTHS = {"model": {"features": (16, 32)}}
RATES = {"optimizer": {"learning_rate": "1e-3,3e-3"}}


def test_every_combination_is_a_run_with_a_grid_inside():
  across = {"model": {"features": "16,32", "num_layers": [1]}}
  runs = plan.plan(
    comparison(attention="dense,linear", seeds="0,1", across=across, grid=RATES)
  )
  assert len({run.identity for run in runs}) == 2 * 2 * 2 * 2
  assert len({run.family for run in runs}) == 8
  points = ((16, 1e-3), (16, 3e-3), (32, 1e-3))
  for run, (width, rate) in zip(runs, points, strict=False):
    across = {"model.features": width, "model.num_layers": 1}
    grid = {"optimizer.learning_rate": rate}
    assert (run.attention, run.across, run.grid) == ("dense", across, grid)
  for run in runs:
    width = run.across["model.features"]
    assert f"--config.model.features={width}" in run.arguments


def test_a_text_of_several_keeps_its_commas():
  """A path may list files; one text alone comes from a command line."""
  texts = ["a.txt,b.txt", "c.txt"]
  for across, values in ((texts, texts), (texts[:1], ["a.txt", "b.txt"])):
    points = comparison(across={"task": {"path": across}}).across_points()
    assert [point["task.path"] for point in points] == values


def test_truth_values_are_those_of_any_flag():
  across = {"model": {"short_convolution": "true,false"}}
  runs = plan.plan(comparison(tasks="recall", attention="dense", across=across))
  values = [run.across["model.short_convolution"] for run in runs]
  assert sorted(set(values)) == [False, True]
  across = {"model": {"short_convolution": "yes"}}
  fault = r"^config.across.model.short_convolution: expected a valid boolean"
  with pytest.raises(ConfigError, match=fault):
    plan.plan(comparison(tasks="recall", across=across))


def test_parameters_are_those_of_dense_at_the_same_values():
  runs = plan.plan(comparison(attention="dense,additive", across=WIDTHS))
  dense = {
    run.across["model.features"]: run.parameters
    for run in runs
    if run.attention == "dense"
  }
  assert dense[32] > 1.5 * dense[16]
  for run in runs:
    expected = dense[run.across["model.features"]]
    assert abs(run.parameters - expected) < 0.02 * expected


def test_values_that_a_mechanism_cannot_have_are_rows_that_say_so():
  across = {"model": {"position": ("sinusoidal", "alibi")}}
  runs = plan.plan(
    comparison(tasks="duplicate", attention="dense,linear", across=across)
  )
  assert [bool(run.obstacle) for run in runs] == [False, False, False, True]
  assert runs[3].across == {"model.position": "alibi"}


def test_a_budget_decides_the_steps_alone():
  mapping = {"tasks": "copy", "budget_flops": 1e9}
  for field in ("across", "grid"):
    with pytest.raises(ConfigError, match="determines the number of steps"):
      config.parse({**mapping, field: {"num_steps": (4, 8)}})


def test_without_values_a_comparison_is_what_it_was(tmp_path):
  before = folder_lib.shared(comparison())
  empty = folder_lib.shared(comparison(across={"model": {}, "task": {}}))
  assert empty == before
  records.claim(tmp_path, before)
  records.check(tmp_path, empty)
  with pytest.raises(ConfigError, match=r"config\.across\.model\.features is"):
    records.check(tmp_path, folder_lib.shared(comparison(across=WIDTHS)))
  [run] = plan.plan(comparison(attention="dense"))
  assert run.across == {}


def test_a_reference_is_declared_before_the_runs(tmp_path):
  """A folder without one stays as it was, and takes none after a look."""
  without = folder_lib.shared(comparison())
  assert "reference" not in without
  declared = comparison(attention="dense,linear", reference="dense")
  assert folder_lib.shared(declared)["reference"] == "dense"
  records.claim(tmp_path, without)
  with pytest.raises(ConfigError, match=r"config\.reference is"):
    records.check(tmp_path, folder_lib.shared(declared))
  with pytest.raises(ConfigError, match=r"reference.*one of dense, linear"):
    comparison(attention="dense,linear", reference="lsh")
  comparison(attention="dense,linear", reference="dense, features=16")
  values = {"optimizer.b2": 0.9}
  runs = [
    Run("copy", name, name, 0, {}, {}, values | {"model.features": n})
    for name in ("dense", "lsh")
    for n in (16, 32)
  ]
  runs[2] = dataclasses.replace(runs[2], obstacle="too short")
  plan.check_reference(runs, "dense, features=16")
  plan.check_reference(runs, "lsh, features=32, b2=0.9")
  for missing in ("dense", "lsh, features=16"):
    rows = "rows dense, features=16; dense, features=32; lsh, features=32, got"
    with pytest.raises(ConfigError, match=f"{rows} '{missing}'"):
      plan.check_reference(runs, missing)


def test_what_a_task_takes_counts_only_where_the_task_runs():
  per_task = {"copy": {"batch_size": 4}, "listops": {"batch_size": 2}}
  both = folder_lib.shared(comparison(tasks="copy,listops", per_task=per_task))
  assert both["per_task.copy.batch_size"] == 4
  assert both["per_task.listops.batch_size"] == 2
  one = folder_lib.shared(comparison(tasks="copy", per_task=per_task))
  assert one == folder_lib.shared(
    comparison(tasks="copy", per_task={"copy": {"batch_size": 4}})
  )


def test_a_record_has_the_values_and_the_trained_length(tmp_path):
  across = {"model": {"features": (16,)}}
  for task, length in (("induction", 64), ("recall", None)):
    [run] = plan.plan(comparison(tasks=task, attention="dense", across=across))
    records.write(tmp_path, run, status=records.DONE)
    [path] = (tmp_path / records.RECORDS).glob(f"{task}*")
    record = json.loads(path.read_text())
    assert record["across"] == {"model.features": 16}
    assert record["length"] == length
