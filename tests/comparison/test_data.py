"""A comparison is of the data that it began with, and of no others."""

import json

import pytest

from comparison import plan, records, run
from settings.errors import ConfigError
from tasks import files
from tests.comparison import plans
from training import ownership

TEXT = "abcd efgh\n" * 40
SMALL = {
  **{"tasks": "text", "grid": {}, "attention": "dense", "seeds": "0"},
  **{"task.context": 8, "task.vocabulary": "bytes"},
  **{"model.features": 8, "model.num_heads": 1},
}


def compared(path, **changes):
  mapping = {**SMALL, "task.path": str(path), **changes}
  return plans.comparison(**mapping)


@pytest.fixture
def twice(tmp_path):
  """Two texts whose paths end alike, and the `task.path` of both."""
  paths = [tmp_path / name / "data/train.txt" for name in ("en", "de")]
  for path in paths:
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
  return paths, ",".join(map(str, paths))


@pytest.mark.parametrize("number", [0, 1])
def test_a_text_that_was_replaced_is_told(trainer, folder, twice, number):
  paths, path = twice
  run.run(compared(path), folder)
  kept = records.shared_settings(folder)
  names = [f"{language}/data/train.txt" for language in ("de", "en")]
  assert sorted(kept[ownership.DATA]) == names
  # Of the same size and of the same bytes, in another order.
  paths[number].write_text(TEXT[::-1])
  calls = len(trainer.calls)
  told = rf"^workdir: .* other data: {names[1 - number]} is "
  with pytest.raises(ConfigError, match=told):
    run.run(compared(path, attention="dense,performer"), folder)
  assert len(trainer.calls) == calls
  assert records.shared_settings(folder) == kept
  paths[number].write_text(TEXT)
  run.run(compared(path, attention="dense,performer"), folder)
  assert len(trainer.calls) == calls + 1


def test_a_comparison_of_an_earlier_version_goes_on(trainer, folder, twice):
  paths, path = twice
  run.run(compared(path), folder)
  shared = records.shared_settings(folder)
  del shared[ownership.DATA]
  (folder / records.COMPARISON).write_text(json.dumps(shared))
  run.run(compared(path), folder)
  assert len(trainer.calls) == 1
  # From here on it knows its data.
  paths[0].write_text(TEXT[::-1])
  with pytest.raises(ConfigError, match="other data: en"):
    run.run(compared(path), folder)


def test_data_follow_every_leaf_that_names_some(tmp_path):
  """Rows of an `across` over texts, and what is generated, which has none."""
  paths = [tmp_path / f"{name}.txt" for name in "ab"]
  for path in paths:
    path.write_text(TEXT)
  across = {"task": {"path": [str(path) for path in paths]}}
  found = plan.data(plan.plan(compared(paths[0], across=across)))
  assert sorted(found) == [f"{tmp_path.name}/{path.name}" for path in paths]
  assert plan.data(plan.plan(plans.comparison(attention="dense"))) == {}


def test_a_run_that_begins_with_other_data_is_told(folder, tmp_path):
  home = tmp_path / "home"
  files_of_run = {"data/a.txt": "1", "data/b.txt": "2"}
  data = files_of_run | {"x/data/c.txt": "3"}
  records.claim(folder, {"tasks": "text", ownership.DATA: data})
  (home / "vocabulary").mkdir(parents=True)
  for digest, fault in (
    ("2", None),
    ("3", r"^config\.task: data/b\.txt has changed"),
  ):
    notes = files_of_run | {"data/b.txt": digest}
    lines = files.check_data(tmp_path, notes)
    (home / "vocabulary" / files.DATA).write_bytes(lines)
    if fault is None:
      records.check_data(folder, home)
    else:
      with pytest.raises(ConfigError, match=fault):
        records.check_data(folder, home)
