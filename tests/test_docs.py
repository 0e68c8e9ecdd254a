"""The pages name what there is, and are not longer than they may be."""

import ast
import functools
import importlib
import inspect
import pathlib
import re

import pytest

from attention import positions
from attention.softmax import logits
from tests.attention.forms import FUNCTIONS, OWN

_ROOT = pathlib.Path(__file__).parent.parent
_DOCS = _ROOT / "docs"
_PAGES = {
  path: path.read_text("utf-8")
  for path in sorted(_DOCS.rglob("*.md"))
  if "_build" not in path.parts and path.parent.name != "mechanisms"
}
_PAGES_OF_ALL = _PAGES | {
  path: path.read_text("utf-8")
  for path in (_ROOT / "README.md", _ROOT / "CONTRIBUTING.md")
}


def _prose(text):
  """A page without code, which may have what looks like a link."""
  return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.M | re.S)


def _public(module):
  """`__all__` of a file, which is not imported."""
  for node in ast.parse((_ROOT / module).read_text("utf-8")).body:
    if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets):
      return ast.literal_eval(node.value)
  raise AssertionError(f"{module} has no __all__")


def test_every_public_name_is_in_the_reference():
  text = "\n".join(
    text for path, text in _PAGES.items() if path.parent.name == "reference"
  )
  for module, file in (
    ("attention", "attention/__init__.py"),
    ("attention.definitions", "attention/definitions/__init__.py"),
    ("attention.testing", "attention/testing/__init__.py"),
    ("models", "models/__init__.py"),
    ("lab", "lab.py"),
  ):
    blocks = re.findall(
      rf"^```{{reference}} {re.escape(module)}\n(.*?)^```$", text, re.M | re.S
    )
    listed = "\n".join(blocks).split()
    assert len(listed) == len(set(listed)), module
    told = {*listed, *re.findall(r"`(?:\w+\.)*(\w+)`", text)}
    assert set(_public(file)) <= told, module


def test_pages_of_how_to_are_short():
  pages = {p: t for p, t in _PAGES.items() if p.parent.name == "howto"}
  assert len(pages) > 10
  assert [p.name for p, t in pages.items() if t.count("\n") > 80] == []


def test_every_picture_has_an_alternative_text():
  for path, text in _PAGES.items():
    assert re.findall(r"!\[\s*\]\(", text) == [], path
    for image in re.findall(r"<img [^>]*>", text):
      assert re.search(r'alt="[^"]+"', image), path


def test_code_of_pages_imports_what_there_is():
  packages = {p.parent.name for p in _ROOT.glob("*/__init__.py")} | {"lab"}
  imports = re.compile(
    r"^from ([\w.]+) import (\([^)]*\)|[^\n(]*)$", flags=re.MULTILINE
  )
  blocks = re.compile(r"^```\{?(?:python|code-cell).*?^```$", re.M | re.S)
  found = {
    (module, name.partition(" as ")[0].strip())
    for text in _PAGES_OF_ALL.values()
    for block in blocks.findall(text)
    for module, names in imports.findall(block)
    if module.partition(".")[0] in packages
    for name in re.sub(r"#.*|[()]", "", names).split(",")
    if name.strip()
  }
  assert len(found) > 30
  for module, name in sorted(found):
    if not hasattr(importlib.import_module(module), name):
      importlib.import_module(f"{module}.{name}")


def test_links_between_files_lead_somewhere():
  missing = [
    f"{path.relative_to(_ROOT)}: {link}"
    for path, text in _PAGES_OF_ALL.items()
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", _prose(text))
    if ":" not in link and not (path.parent / link).exists()
  ]
  assert missing == []


def test_every_page_is_in_a_table_of_contents():
  text = "\n".join(
    block
    for page in _PAGES.values()
    for block in re.findall(r"^```{toctree}\n.*?^```$", page, re.M | re.S)
  )
  for path in _PAGES:
    name = path.stem if path.stem != "index" else f"{path.parent.name}/index"
    if path.parent.name in ("results", "tutorials"):
      continue
    if path.parent == _DOCS and path.stem in ("index", "start", "404"):
      continue
    assert re.search(rf"\b{re.escape(name)}\b", text), path


def test_promises_name_tests_that_are_there():
  text = _PAGES[_DOCS / "promises.md"]
  rows = re.findall(r"^\| [A-Z].* \| (.*) \|$", text, re.M)
  assert len(rows) > 20
  for row in rows:
    files = re.findall(r"\]\((\.\./[^)]+\.py)\)", row)
    code = "".join((_DOCS / file).read_text("utf-8") for file in files)
    for name in re.findall(r"`(\w+)`", row):
      assert f"def {name}(" in code, row


# docs/mechanisms.md

_MECHANISMS = _PAGES[_DOCS / "mechanisms.md"]
_OPENING, *_SECTIONS = re.split(r"^## ", _MECHANISMS, flags=re.M)
_SECTION = {text.split("\n")[0].strip("`"): text for text in _SECTIONS}


def _papers(text):
  return set(re.findall(r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{4,5})", text))


def _fast(name):
  """The function of a mechanism; a recurrence is its factory."""
  return FUNCTIONS.get(name, OWN[name])


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
  assert list(_SECTION) == ["How the fast forms work", *OWN, "Positions"]
  named = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", _OPENING, flags=re.M)
  assert named == [(name, name) for name in OWN]


def test_every_section_has_its_picture_and_is_small():
  draw = importlib.import_module("docs.draw_mechanisms")
  assert {*OWN, "positions"} <= set(draw.PICTURES)
  for name in (*OWN, "positions"):
    section = _SECTION[name if name in OWN else "Positions"]
    assert f"](mechanisms/{name}.png)" in section
    picture = _DOCS / "mechanisms" / f"{name}.png"
    assert 1_000 < picture.stat().st_size < 25_000


@pytest.mark.parametrize("name", OWN)
def test_a_section_cites_and_links_what_its_code_does(name):
  section, function = _SECTION[name], _fast(name)
  cited = _papers(section)
  assert cited
  assert cited <= _papers(function.__doc__)
  folder = _ROOT / "attention" / "definitions"
  code = function.__module__.replace(".", "/")
  own = name if (folder / f"{name}.py").exists() else code.rpartition("/")[2]
  assert f"[definition](../attention/definitions/{own}.py)" in section
  assert f"[code](../{code}.py)" in section
  if name in FUNCTIONS:
    option = "chunk_size" if name == "lsh" else "block_size"
    assert option in inspect.signature(function).parameters


def test_papers_of_all_docstrings_are_cited():
  documented = set().union(*(_papers(_fast(name).__doc__) for name in OWN))
  assert documented <= _papers(_MECHANISMS)
  documented = _papers(positions.__doc__)
  for item in vars(positions).values():
    if getattr(item, "__module__", None) == positions.__name__:
      documented |= _papers(item.__doc__ or "")
  cited = _papers(_SECTION["Positions"])
  assert documented <= cited <= documented | _papers(logits.__doc__)


def test_names_with_a_link_are_defined_in_the_linked_file():
  links = re.findall(r"\[`([^`]+)`\]\(\.\./([^)]+\.py)\)", _MECHANISMS)
  assert len(links) > 10
  missing = [
    f"{name} in {path}"
    for name, path in links
    if name not in _defined(_ROOT / path)
  ]
  assert not missing


def test_the_site_has_a_page_for_each_section_and_keeps_its_anchor():
  pages = importlib.import_module("docs.mechanism_pages")
  text = pages.overview(_MECHANISMS)
  for name in OWN:
    assert f'<span id="{name}"></span>[`{name}`](mechanisms/{name}.md)' in text
    assert f"\nmechanisms/{name}\n" in text
    assert f"## `{name}`" not in text
    section = pages.sections()[name]
    assert "\n```math\n" in section.text
    assert section.sources.startswith("[")
  assert "## Positions" in text


def test_a_page_of_a_mechanism_has_what_the_tables_say(monkeypatch):
  pages = importlib.import_module("docs.mechanism_pages")
  monkeypatch.setattr(
    pages, "_solved_seeds", lambda: {"delta": {"recall": "8 of 8"}}
  )
  text = pages.page("delta")
  for part in (
    "\n## Cost\n\nWith C = `scan.CHUNK`: ",
    "\n\nThe cost of `gated_linear_attention`:\n\nWith C = `scan.CHUNK`: time",
    "\n- A state that tracks permutations of two or three letters: ",
    "\n| `max_rate=1.0` | the largest β. ",
    "| [fla-core 0.6.0](",
    "\n- recall of 16 pairs at width 64: 8 of 8\n",
  ):
    assert part in text, part


def test_a_notebook_runs_again_when_what_it_depends_on_changed(
  monkeypatch, tmp_path
):
  notebooks = importlib.import_module("docs.notebooks")
  monkeypatch.setattr(notebooks, "ROOT", tmp_path)
  for name in ("attention/dense.py", "data/text.txt", "data/other.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("1")
  notebook = _HEADER + 'Page\n\nopen("data/text.txt")\n'

  def key():
    notebooks._laboratory.cache_clear()
    content = [notebook]
    notebooks.add_key(None, "page", content)
    assert content[0].count("\n") == notebook.count("\n")
    return content[0]

  keys = [key(), key()]
  for name in ("data/other.txt", "data/text.txt", "attention/dense.py"):
    (tmp_path / name).write_text("2")
    keys.append(key())
  notebooks._laboratory.cache_clear()
  assert keys[0] == keys[1] == keys[2]
  assert len(set(keys)) == 3


def test_a_downloaded_notebook_keeps_outputs_without_hidden_cells():
  notebooks = importlib.import_module("docs.notebooks")
  cells = [
    {"source": "os.chdir('..')", "metadata": {"tags": ["remove-cell"]}},
    {"source": "1 + 1", "metadata": {}, "outputs": [{"text": "2"}]},
  ]
  content = {"cells": cells, "metadata": {"kernelspec": {"display_name": "a1"}}}
  new = notebooks.download(content, "https://example.org/lab")
  first, second = new["cells"]
  assert "!git clone --quiet https://example.org/lab ch" in first["source"]
  assert second == cells[1]
  assert new["metadata"]["kernelspec"]["display_name"] == "Python 3"


def test_every_config_of_the_core_is_in_the_table():
  files = {
    path.stem
    for path in (_ROOT / "configs").glob("*.py")
    if "def get_config" in path.read_text() and not path.is_symlink()
  }
  named = re.findall(
    r"^\| \[`(\w+)`\]\(../configs", _PAGES[_DOCS / "training.md"], re.M
  )
  of_projects = {path.stem for path in _ROOT.glob("projects/*/configs/*.py")}
  assert files - of_projects <= {*named} <= files | of_projects


# The tutorials, which the docs build executes.

_TUTORIALS = [
  path
  for path in _PAGES
  if path.parent.name == "tutorials" or path == _DOCS / "start.md"
]
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


def test_a_tutorial_is_a_notebook_with_a_picture():
  assert len(_TUTORIALS) == 14
  for path in _TUTORIALS:
    text = _PAGES[path]
    assert text.startswith(_HEADER), path
    cells = _CELL.findall(text)
    assert len(cells) == text.count("```{"), path
    for number, (options, source) in enumerate(cells):
      compile(source, f"{path}, cell {number}", "exec")
      assert not _DRAWS.search(source) or "alt:" in options, source
    assert any(_DRAWS.search(source) for _, source in cells), path


def test_the_campaign_and_the_planted_faults_fit_the_tree():
  importlib.import_module("tests.verification.campaign.__main__")
  faults = importlib.import_module("tests.verification.mutants.__main__")
  assert [x for x in faults.MUTANTS if not faults.fits(x)] == []
