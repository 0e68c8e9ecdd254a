"""Projects stand beside the core: without any of them the rest works."""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from comparison import plan
import models
from models.published import catalog
from settings.errors import ConfigError
from settings.import_paths import load
import tasks
from tests import commands
from tests.here import CORE

ROOT = commands.ROOT
PROJECTS = sorted(p.parent.name for p in ROOT.glob("projects/*/__init__.py"))
TABLES = {
  "MODELS": models.CONFIGS,
  "TASKS": tasks.TASKS,
  "FAMILIES": catalog.FAMILIES,
  "FORMER_KINDS": {},
}


@pytest.mark.parametrize("project", PROJECTS)
def test_the_core_names_no_project(project):
  """Neither its path, nor its name or that of one of its models as a string."""
  module = importlib.import_module(f"projects.{project}")
  names = {project, *getattr(module, "MODELS", ())}
  named = re.compile(
    rf"projects[./]{project}|[\"'](?:{'|'.join(sorted(names))})[\"']"
  )
  for folder in CORE:
    for path in [ROOT / folder, *ROOT.glob(f"{folder}/**/*.py")]:
      if path.is_file():
        assert not named.search(path.read_text("utf-8")), path


def test_projects_register_what_is_there():
  """Tables that the core reads, no name twice, each an import path that works."""
  for project in PROJECTS:
    module = importlib.import_module(f"projects.{project}")
    tables = {name for name in vars(module) if name.isupper()}
    assert tables <= TABLES.keys(), f"projects/{project}/__init__.py"
  for table, known in TABLES.items():
    parts = [
      getattr(importlib.import_module(f"projects.{project}"), table, {})
      for project in PROJECTS
    ]
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), table
    for part in parts:
      for name, path in part.items():
        if table != "FORMER_KINDS":
          load(path)
        if known:
          assert known.paths[name] == path, "the core has this name too"


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_says_what_it_is(project):
  lines = (ROOT / "projects" / project / "README.md").read_text().splitlines()
  assert 3 <= len(lines) <= 20


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """A copy of everything that tests read."""
  copy = tmp_path_factory.mktemp("checkout") / "copy"
  shutil.copytree(
    ROOT,
    copy,
    ignore=shutil.ignore_patterns(
      ".git", ".venv", ".cache", "__pycache__", "runs"
    ),
  )
  return copy


def run(folder, *command):
  return subprocess.run(
    [sys.executable, *command],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": str(folder)},
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_comparison_of_a_project_that_is_not_here_is_told(monkeypatch):
  monkeypatch.delitem(sys.modules, "configs.vit", raising=False)
  monkeypatch.setitem(sys.modules, "projects.vision.configs.vit", None)
  with pytest.raises(ConfigError, match=r"configs/vit\.py .*projects\.vision"):
    plan.config_of("vit", "dense", {})


@pytest.mark.thorough
@pytest.mark.parametrize("project", PROJECTS)
def test_without_a_project_the_rest_works(checkout, project, tmp_path):
  """All tests are collected, which imports everything; those of the core pass."""
  away = shutil.move(checkout / "projects" / project, tmp_path / project)
  try:
    result = run(
      checkout, "-m", "pytest", "--collect-only", "-q", "tests", "projects"
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    result = run(
      checkout,
      "train.py",
      "--config=configs/copy.py",
      "--config.num_steps=1",
      f"--workdir={tmp_path / 'run'}",
    )
    assert result.returncode == 0, result.stderr
    for config in pathlib.Path(tmp_path / project / "configs").glob(
      "[a-z]*.py"
    ):
      result = run(checkout, "train.py", f"--config=configs/{config.name}")
      assert result.returncode == 2
      assert result.stderr.count("\n") == 1
      assert f"projects.{project}" in result.stderr
    chosen = ("tests/tasks", "tests/models", "tests/training")
    options = ("-q", "-x", "-m", "not thorough")
    result = run(checkout, "-m", "pytest", *options, *chosen)
    assert result.returncode == 0, result.stdout[-3000:]
  finally:
    shutil.move(away, checkout / "projects" / project)
