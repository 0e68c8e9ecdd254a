"""`docs/mechanisms.md` tells the truth: names, links, papers and pictures."""

import ast
import functools
import importlib
import inspect
import pathlib
import re

import pytest

from attention import logits, positions
from tests.attention.forms import FUNCTIONS, OWN

_ROOT = pathlib.Path(__file__).parent.parent
_PAGE = _ROOT / "docs" / "mechanisms.md"
_OPENING, *_SECTIONS = re.split(r"^## ", _PAGE.read_text(), flags=re.M)
_SECTION = {text.split("\n")[0].strip("`"): text for text in _SECTIONS}
_HOW = "How the fast forms work"


def _papers(text):
  return set(re.findall(r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{4,5})", text))


@functools.cache
def _defined(path):
  """Every name that a file defines: functions, classes, arguments, variables."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    match node:
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
        names.add(name)
      case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
        names.add(name)
  return names


def test_every_mechanism_has_a_section_in_the_order_of_the_registry():
  assert list(_SECTION) == [_HOW, *OWN, "Positions"]


def test_every_mechanism_is_in_the_opening_table():
  named = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", _OPENING, flags=re.M)
  assert named == [(name, name) for name in OWN]


@pytest.mark.parametrize("name", [*OWN, "positions"])
def test_picture_stands_in_its_section_and_is_small(name):
  section = _SECTION[name if name in OWN else "Positions"]
  assert f"](mechanisms/{name}.png)" in section
  picture = _PAGE.parent / "mechanisms" / f"{name}.png"
  assert 1_000 < picture.stat().st_size < 25_000


def _fast(name):
  """The function of a mechanism; a recurrence is its factory."""
  return FUNCTIONS.get(name, OWN[name])


@pytest.mark.parametrize("name", OWN)
def test_papers_are_among_those_of_the_docstring(name):
  cited = _papers(_SECTION[name])
  assert cited
  assert cited <= _papers(_fast(name).__doc__)


def test_papers_of_all_docstrings_are_cited():
  documented = set().union(*(_papers(_fast(name).__doc__) for name in OWN))
  assert documented <= _papers(_PAGE.read_text())


def test_papers_of_positions_are_those_of_the_docstrings():
  documented = _papers(positions.__doc__)
  for item in vars(positions).values():
    if getattr(item, "__module__", None) == positions.__name__:
      documented |= _papers(item.__doc__ or "")
  cited = _papers(_SECTION["Positions"])
  assert documented <= cited
  assert cited <= documented | _papers(logits.__doc__)


@pytest.mark.parametrize("name", OWN)
def test_every_section_links_its_definition_and_its_code(name):
  folder = _ROOT / "attention" / "definitions"
  own = name if (folder / f"{name}.py").exists() else "recurrent"
  code = _fast(name).__module__.replace(".", "/")
  assert f"[definition](../attention/definitions/{own}.py)" in _SECTION[name]
  assert f"[code](../{code}.py)" in _SECTION[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_may_give_the_size_of_blocks(name):
  function = FUNCTIONS[name]
  option = "chunk_size" if name == "lsh" else "block_size"
  assert option in inspect.signature(function).parameters


def test_names_with_a_link_are_defined_in_the_linked_file():
  links = re.findall(r"\[`([^`]+)`\]\(\.\./([^)]+\.py)\)", _PAGE.read_text())
  assert len(links) > 10
  missing = [
    f"{name} in {path}"
    for name, path in links
    if name not in _defined(_ROOT / path)
  ]
  assert not missing


def test_files_with_a_link_exist():
  for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", _PAGE.read_text()):
    assert (_PAGE.parent / path).exists(), path


def test_drawn_are_all_mechanisms_and_positions():
  draw = importlib.import_module("docs.draw_mechanisms")
  assert {*OWN, "positions"} <= set(draw.PICTURES)
