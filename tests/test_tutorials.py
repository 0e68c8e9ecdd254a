"""The tutorials are notebooks that MyST-NB can execute; the docs build does so."""

import pathlib
import re

import pytest

_DOCS = pathlib.Path(__file__).parent.parent / "docs"
_PAGES = {
  page.stem: page
  for page in (_DOCS / "start.md", *sorted(_DOCS.glob("tutorials/*.md")))
}
_HEADER = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# "
_CELL = re.compile(
  r"^```\{code-cell\} ipython3\n"
  r"(---\n.*?^---\n|(?::[^\n]*\n)+\n)?(.*?)^```$",
  flags=re.DOTALL | re.MULTILINE,
)
_DRAWS = re.compile(
  r"^(figure, .*plt\.subplots\(|axes = .*\.plot\(|draw\(|Image\(|"
  r"(run|results|attention_maps)\.(attention_maps|curves|figure)\()",
  flags=re.MULTILINE,
)


def test_all_tutorials_are_there():
  assert len(_PAGES) == 9


@pytest.mark.parametrize("name", _PAGES)
def test_a_tutorial_is_a_notebook_that_ends_in_a_picture(name):
  text = _PAGES[name].read_text()
  assert text.startswith(_HEADER)
  cells = _CELL.findall(text)
  assert len(cells) == text.count("```{")
  for number, (options, source) in enumerate(cells):
    compile(source, f"{name}, cell {number}", "exec")
    assert not _DRAWS.search(source) or "alt:" in options, source
  assert _DRAWS.search(source), source


@pytest.mark.parametrize("name", _PAGES)
def test_links_lead_to_files(name):
  prose = _CELL.sub("", _PAGES[name].read_text())
  for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
    assert (_PAGES[name].parent / path).exists(), path
