"""Every leaf is told with its value and meaning, in --help and in the page."""

import pathlib

from settings.field_values import flatten
from tests import commands
from tests.training import defaults
from tests.training.tiny import config
from training.commands import config_help


def test_help_behind_a_config_has_its_leaves():
  code, out, error = commands.run(
    "train.py",
    "--config=configs/copy.py:performer",
    "--config.num_steps=7",
    "--help",
  )
  assert (code, error) == (0, "")
  shown = out.splitlines()
  assert "  --config.num_steps=7" in shown
  # With the options that the config leaves at their defaults.
  performer = "performer (num_features=128, kernel='softmax')"
  assert f"  --config.model.encoder_attention={performer}" in shown
  place = shown.index("  --config.optimizer.schedule=cosine")
  assert (
    shown[place + 1]
    .strip()
    .startswith("the schedule after the warm-up: 'constant'")
  )
  # The first flag of all.
  assert shown[shown.index("Flags:") + 1] == "  --config"


def test_every_leaf_of_a_run_is_there():
  mapping = config("encoder", {"name": "copy"}).to_mapping()
  text = config_help.text(mapping)
  for leaf in flatten(mapping):
    # Options of mechanisms are in docs/mechanism_options.md.
    name = leaf.removesuffix(".name") if "attention" in leaf else leaf
    assert f"--config.{name}=" in text or name == "task.name"


def test_the_page_has_type_default_and_meaning():
  page = config_help.page()
  rows = [line.split(" | ") for line in page.splitlines() if "| `" in line]
  assert len(rows) > 100
  assert all(len(row) == 4 and min(map(len, row)) > 2 for row in rows)
  assert ["| `num_steps`", "int ≥ 1, < 2³¹"] in [x[:2] for x in rows]


def test_types_and_defaults_are_those_written_down():
  """An experiment that names no value of a field has its default: the module that
  wrote the file says how to write a new one."""
  kept = pathlib.Path(defaults.__file__).with_suffix(".txt").read_text("utf-8")
  assert sorted(defaults.rows()) == sorted(kept.splitlines())
