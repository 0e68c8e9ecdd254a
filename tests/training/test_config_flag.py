"""Overrides of leaves whose section the config file does not have."""

import sys

from ml_collections import ConfigDict
import pytest

from settings.errors import ConfigError
from training.commands import config_flag


class File:
  """In place of the parser that runs a config file."""

  def parse(self, path):
    return ConfigDict({"num_steps": 3, "model": {"num_layers": 2}})

  def flag_type(self):
    return "config object"


def parsed(monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
  return config_flag._WithSections(File()).parse("file.py").to_dict()


def test_sections_of_overrides_are_added(monkeypatch):
  found = parsed(
    monkeypatch,
    "--config=file.py",
    "--config.per_task.copy.num_steps=3",
    "--noconfig.model.tie_embeddings",
    "--config.modle.num_layers=1",
    "--config.seed=1",
    "--workdir=config.a.b",
  )
  assert found == {
    "num_steps": 3,
    "model": {"num_layers": 2},
    "per_task": {"copy": {}},
    "modle": {},
  }


def test_a_value_is_no_section(monkeypatch):
  with pytest.raises(ConfigError) as info:
    parsed(monkeypatch, "--config.num_steps.x=3")
  assert str(info.value) == (
    "config.num_steps.x: unknown; config.num_steps is one value and has no "
    "fields"
  )


@pytest.mark.parametrize("leaf", ["", ".x", "a b", "model[0]", "a..b", "a-b.c"])
def test_what_is_no_name_is_told(monkeypatch, leaf):
  with pytest.raises(ConfigError, match=r"^--config\..*: expected"):
    parsed(monkeypatch, f"--config.{leaf}=3")


def test_a_word_takes_the_place_of_a_section(monkeypatch):
  """Of one, and of a list of them; a leaf keeps its type."""

  class Sections(File):
    def parse(self, path):
      slot = {"name": "dense", "window": 3}
      return ConfigDict({"model": {"one": slot, "many": [slot], "size": 2}})

  arguments = ("--config.model.one=flash", "--config.model.many=[a,b]")
  monkeypatch.setattr(
    sys, "argv", ["train.py", *arguments, "--config.model.size=3"]
  )
  found = config_flag._WithSections(Sections()).parse("file.py").to_dict()
  assert found == {"model": {"one": "", "many": "", "size": 2}}


def test_none_takes_the_place_of_a_number(monkeypatch):
  """Without a value, a field has no type that would refuse None."""
  found = parsed(monkeypatch, "--config.num_steps=None")
  assert found == {"model": {"num_layers": 2}}
