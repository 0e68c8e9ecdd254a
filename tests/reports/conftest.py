"""One report for all tests: drawing it takes seconds."""

import json

import pytest

from comparison import records
from reports import files
from tests.reports import made_up


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
  """What a report has written of the made-up comparison."""
  folder = tmp_path_factory.mktemp("comparison")
  shared = {
    "tasks": "copy,paper/recall",
    "match_parameters": True,
    "per_task.copy.num_steps": 15,
    f"grid.{made_up.LEAF}": "0.001,0.003",
  }
  (folder / records.COMPARISON).write_text(json.dumps(shared))
  files.write(folder, made_up.records(), made_up.scaling())
  return folder
