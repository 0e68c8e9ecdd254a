"""The README tells the truth: its code runs, its table is the code's."""

import pathlib
import re

import pytest

from attention import ATTENTIONS
from attention.capabilities import CAPABILITIES, capability_table

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()


def test_capability_table_is_generated():
  assert capability_table() in _README, (
    "README.md: replace the table by the output of "
    "`python -m attention.capabilities`"
  )


def test_every_claimed_capability_has_a_column():
  claimed = set().union(*(make().supports for make in ATTENTIONS.values()))
  assert claimed <= set(CAPABILITIES)


def test_python_blocks_run_in_order():
  blocks = re.findall(r"```python\n(.*?)```", _README, flags=re.DOTALL)
  assert len(blocks) >= 3
  namespace = {}
  for block in blocks:
    exec(compile(block, "README.md", "exec"), namespace)
  assert namespace["out"].shape == (2, 1000, 8, 64)
  assert namespace["cosine_out"].shape == (2, 1000, 8, 64)


def test_lines_fit_a_page():
  assert not [line for line in _README.splitlines() if len(line) > 120]


@pytest.mark.parametrize(
  "page",
  ["README.md", "CONTRIBUTING.md", "docs/comparing.md", "docs/results.md"],
)
def test_files_it_names_exist(page):
  named = re.findall(r"\]\(([^)#:]+)\)", (_ROOT / page).read_text())
  assert named
  for path in named:
    assert ((_ROOT / page).parent / path).exists(), path
