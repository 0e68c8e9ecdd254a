"""Projects stand beside the core: without any of them the rest works."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests import commands

ROOT = commands.ROOT
PROJECTS = sorted(p.parent.name for p in ROOT.glob("projects/*/__init__.py"))
CORE = ("attention", "models", "tasks", "training", "comparison")


def test_the_core_imports_no_project():
  """Layers that import-linter holds; here also what is imported lazily."""
  for folder in CORE:
    for path in ROOT.glob(f"{folder}/**/*.py"):
      found = re.findall(
        r"^\s*(?:from|import) (projects\S*)", path.read_text("utf-8"), re.M
      )
      assert not found, path


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
    env={**os.environ, "COMPILE": "quickly", "PYTHONPATH": str(folder)},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.thorough
@pytest.mark.parametrize("project", PROJECTS)
def test_without_a_project_the_rest_works(checkout, project, tmp_path):
  """All tests are collected, which imports everything; the tasks' names pass."""
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
  finally:
    shutil.move(away, checkout / "projects" / project)


@pytest.mark.thorough
@pytest.mark.parametrize("project", PROJECTS)
def test_without_a_project_the_tests_of_the_core_pass(
  checkout, project, tmp_path
):
  away = shutil.move(checkout / "projects" / project, tmp_path / project)
  try:
    chosen = ("tests/tasks", "tests/models", "tests/training")
    marks = "not optimised and not thorough"
    result = run(checkout, "-m", "pytest", "-q", "-x", "-m", marks, *chosen)
    assert result.returncode == 0, result.stdout[-3000:]
  finally:
    shutil.move(away, checkout / "projects" / project)
