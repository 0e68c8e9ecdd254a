"""Every place that tells of a run tells which mechanism fills which slot."""

import dataclasses
import importlib
import json
import pathlib
import re

import pytest

from comparison import plan, records
import models
from settings.errors import ConfigError
from tests.comparison.plans import comparison
from tests.here import is_here
from training import experiment, experiment_config, workdir

MIXED = "linformer · dense · linformer"
_ROOT = pathlib.Path(__file__).parent.parent
_RESULTS = (_ROOT / "docs" / "results_appendix.md").read_text()


def load(task, attention, **leaves):
  config = importlib.import_module(f"configs.{task}").get_config(attention)
  for leaf, value in leaves.items():
    config.model[leaf] = value
  return experiment_config.parse(config)


@pytest.mark.parametrize(
  ("task", "attention", "expected"),
  [
    ("copy", "performer", "performer · performer · performer"),
    ("copy", "linformer", MIXED),
    ("copy", "bigbird", "bigbird · dense · dense"),
    ("recall", "linear", "linear"),
    ("listops", "nystrom", "nystrom"),
    (
      "copy",
      "sliding_window:window=4",
      "sliding_window · sliding_window · dense",
    ),
    ("copy", "flash,delta", "dense · flash + delta · dense"),
    ("duplicate", "flash,delta", "flash + delta"),
    *[("translation", "bahdanau", "additive")] * is_here("bahdanau"),
  ],
)
def test_slots_are_in_order_and_one_is_alone(task, attention, expected):
  assert models.slots(load(task, attention).model) == expected
  # They are those of the config and not of its name.
  if expected == MIXED:
    config = load(task, attention, cross_attention={"name": "flash"})
    assert models.slots(config.model) == "linformer · dense · flash"


def test_the_first_line_of_a_run_says_them():
  told = experiment.describe(experiment.create(load("copy", "linformer")))
  assert told.startswith(f"slots {MIXED} (encoder · decoder · cross); ")
  told = experiment.describe(experiment.create(load("recall", "linear")))
  assert told.startswith("slots linear (decoder); ")


def test_the_folder_of_a_run_says_them_and_is_continued(tmp_path):
  config = load("copy", "linformer")
  workdir.write_config(tmp_path, config)
  path = tmp_path / workdir.CONFIG
  assert path.read_text("utf-8").count(f'"slots": "{MIXED}"') == 1
  written = workdir.read_config(tmp_path)
  assert written.pop("slots") == MIXED
  assert written == json.loads(json.dumps(config.to_mapping()))
  assert experiment_config.parse(workdir.read_config(tmp_path)) == config
  workdir.check(tmp_path, config)
  assert f"slots: {MIXED}\n" in workdir.summary(tmp_path, {})
  # A run of a version that did not write them.
  path.write_text(json.dumps(written))
  workdir.check(tmp_path, config)
  assert "slots" not in workdir.summary(tmp_path, {})


def test_slots_cannot_be_chosen():
  mapping = load("copy", "linformer").to_mapping()
  with pytest.raises(
    ConfigError, match=rf"^config.slots: .*'{MIXED}', got 'x'"
  ):
    experiment_config.parse({**mapping, "slots": "x"})


def test_a_comparison_records_them(tmp_path):
  copied, refused = (
    plan.plan(comparison(tasks=task, attention="linformer"))[0]
    for task in ("copy", "duplicate")
  )
  assert (copied.slots, refused.slots) == (MIXED, "")
  # The same folder as before there were slots in a plan.
  assert copied.identity == dataclasses.replace(copied, slots="").identity
  records.write(tmp_path, copied, status=records.TRAINED)
  (record,), _ = records.read(tmp_path)
  assert record["slots"] == MIXED


def test_the_commands_of_the_results_have_configs():
  runs = re.findall(
    r"^\| `train.py --config=configs/(\w+)\.py:?(\w*)", _RESULTS, re.M
  )
  assert len(runs) == 16
  for task, attention in runs:
    if not (is_here(task) and is_here(attention)):
      continue
    own_data = ("translation", "vit", "swin", "cvt", "perceiver", "conformer")
    leaves = {} if task in own_data else {"path": "x"}
    config = importlib.import_module(f"configs.{task}").get_config(
      *([attention] if attention else [])
    )
    config.task.update(leaves)
    experiment_config.parse(config)
