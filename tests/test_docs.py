"""The pages of docs/ name what there is, and are not longer than they may be."""

import ast
import pathlib
import re

_ROOT = pathlib.Path(__file__).parent.parent
_DOCS = _ROOT / "docs"
_PAGES = {
  path: path.read_text("utf-8")
  for path in sorted(_DOCS.rglob("*.md"))
  if "_build" not in path.parts
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


def test_links_between_files_lead_somewhere():
  missing = [
    f"{path.relative_to(_ROOT)}: {link}"
    for path, text in _PAGES.items()
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
