"""`pip install .` installs the library alone, with what it imports."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import attention

_ROOT = pathlib.Path(__file__).parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())


def imported(path):
  """Top-level names of the modules that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield (node.module or "").partition(".")[0]


def names(requirements):
  return {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in requirements}


def test_the_library_needs_what_it_imports():
  found = {
    name
    for path in (_ROOT / "attention").rglob("*.py")
    for name in imported(path)
  }
  others = found - set(sys.stdlib_module_names) - {"attention"}
  # Extras: kernels of `implementation='tokamax'`, modules of `attention.flax`
  # and tests of `attention.testing`.
  optional = _PROJECT["project"]["optional-dependencies"]
  extras = {*names(optional["tokamax"] + optional["flax"] + optional["test"])}
  assert others - extras == names(_PROJECT["project"]["dependencies"])


def test_flax_is_imported_by_its_modules_alone():
  paths = (_ROOT / "attention").rglob("*.py")
  found = [path.name for path in paths if "flax" in {*imported(path)}]
  assert found == ["flax.py"]


def test_one_package_is_installed():
  wheel = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
  assert wheel == {"packages": ["attention"]}
  assert attention.__version__.count(".") == 2
  for path in (_ROOT / "attention").rglob("*.py"):
    assert (path.parent / "__init__.py").exists(), path
  assert (_ROOT / "attention" / "py.typed").exists()


def test_the_citation_names_this_version():
  citation = (_ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {attention.__version__}\n" in citation


def test_few_modules_are_imported():
  """`from attention import *` leaves what no function needs to be asked for."""
  script = (
    "from attention import *; import sys; "
    "print(*(x for x in sys.modules if x.split('.')[0] == 'attention'))"
  )
  result = subprocess.run(
    [sys.executable, "-c", script],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  modules = result.stdout.split()
  assert len(modules) <= 83
  assert "attention.definitions" not in modules
  assert "attention.testing" not in modules


def test_the_laboratory_names_what_it_imports():
  """Every library that a program imports is in an extra, none by accident."""
  here = {path.name for path in _ROOT.iterdir() if path.is_dir()}
  programs = {*_ROOT.glob("*.py")} - {_ROOT / "conftest.py"}
  here |= {path.stem for path in programs}
  found = {
    name
    for folder in here - {"tests", ".venv", "runs"}
    for path in (_ROOT / folder).rglob("*.py")
    if not folder.startswith(".") and "tests" not in path.parts
    for name in imported(path)
  } | {name for path in programs for name in imported(path)}
  others = found - set(sys.stdlib_module_names) - here
  project = _PROJECT["project"]
  known = names(project["dependencies"])
  for extra in ("docs", "lab", "test", "tokamax", "wandb"):
    known |= names(project["optional-dependencies"][extra])
  spelt = {
    "absl": "absl_py",
    "orbax": "orbax_checkpoint",
    "PIL": "pillow",
    "pydantic_core": "pydantic",  # Its other half, which it pins.
    "sklearn": "scikit_learn",
  }
  assert {spelt.get(name, name) for name in others} <= known
