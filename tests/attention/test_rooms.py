"""Mechanisms import the machinery, and the machinery imports no mechanism."""

import ast
import pathlib

import pytest

from attention import ATTENTIONS

ROOT = pathlib.Path(__file__).parents[2] / "attention"
FACTORIES = [factory.__module__ for factory in ATTENTIONS.values()]
ROOMS = ("softmax", "recurrent", "platform")


def imported(path):
  """Every module of the library that a file imports, by its whole name."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      yield node.module
      yield from (f"{node.module}.{name.name}" for name in node.names)
    if isinstance(node, ast.Import):
      yield from (name.name for name in node.names)


def test_every_factory_stands_in_a_file_of_mechanisms():
  folders = {tuple(name.split(".")[:-1]) for name in FACTORIES}
  assert folders == {("attention",)}


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_a_mechanism(room):
  files = sorted((ROOT / room).glob("*.py"))
  assert len(files) >= 4
  for path in files:
    assert not set(FACTORIES) & set(imported(path)), path
