"""The README tells the truth: its code runs, its table is the code's."""

import pathlib
import re
import sys
import types

import jax
import pytest

from attention.mechanism import CAPABILITIES, example
from docs import results
from docs.capabilities import COLUMNS, capability_table
from tests.attention.forms import OWN

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()


def test_capability_table_is_generated():
  own = {name: example(make) for name, make in OWN.items()}
  assert capability_table(own) in (_ROOT / "docs" / "library.md").read_text(), (
    "docs/library.md: replace the table by the output of "
    "`python -m docs.capabilities`"
  )


def test_every_claimed_capability_has_a_column():
  claimed = set().union(*(make().supports for make in OWN.values()))
  assert claimed <= set(CAPABILITIES) == set().union(*COLUMNS.values())


def _run(page, namespace):
  """Executes the Python blocks of a page in order."""
  blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
  for block in blocks:
    exec(compile(block, page.name, "exec"), namespace)
  return namespace


def test_it_is_read_in_a_minute():
  lines = _README.splitlines()
  assert len(lines) <= 130
  assert not [line for line in lines if len(line) > 120]


def test_its_counts_are_those_of_the_records():
  assert results.regenerate(_README, _ROOT) == _README, (
    "README.md: run `python -m docs.results README.md`"
  )


@pytest.fixture(scope="module")
def readme():
  return _run(_ROOT / "README.md", {"__name__": "my_package.my_module"})


def test_python_blocks_run_in_order(readme):
  assert readme["out"].shape == (2, 1000, 8, 64)


def test_python_blocks_of_the_library_page():
  """Traced: its values are of no interest."""
  page = {}
  jax.eval_shape(lambda: _run(_ROOT / "docs" / "library.md", page) and None)
  assert page["out"].shape == (2, 1000, 8, 64)
  assert page["layer"].num_heads == 8


@pytest.mark.thorough
def test_cosine_keeps_the_contract(readme, monkeypatch):
  """The README's mechanism passes the check of the tutorial."""
  module = types.ModuleType("cosine_attention")
  monkeypatch.setitem(sys.modules, module.__name__, module)
  vars(module).update(readme)
  tutorial = (_ROOT / "docs/tutorials/5_own_mechanism.md").read_text()
  cells = re.findall(
    r"```\{code-cell\}.*?\n(.*?)```", tutorial, flags=re.DOTALL
  )
  (check,) = (cell for cell in cells if "check_mechanism(cosine" in cell)
  exec(check, {})


@pytest.mark.thorough
def test_decay_keeps_the_contract(readme, monkeypatch):
  """The test that docs/adding_a_mechanism.md shows passes."""
  module = types.ModuleType("my_package.my_module")
  monkeypatch.setitem(sys.modules, "my_package", types.ModuleType("my_package"))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  # The page goes on with the module of the README, and imports from it.
  vars(module).update(readme)
  _run(_ROOT / "docs" / "adding_a_mechanism.md", vars(module))
  module.__dict__["test_decay"]()


def test_published_weights(monkeypatch):
  """The block of docs/weights.md, in the folder that it is written for."""
  monkeypatch.chdir(_ROOT)
  page = _run(_ROOT / "docs" / "weights.md", {})
  assert page["logits"].shape == (1, 5, 61)
  assert page["swapped"].family == "bert"
