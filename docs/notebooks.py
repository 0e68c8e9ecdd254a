"""Caches the outputs of notebooks and offers each notebook as a file.

jupyter-cache identifies a notebook by the code of its cells and by its kernel. This
module adds to the display name of the kernel a digest of everything else that the
outputs depend on: the laboratory's files, the versions of installed packages, and
the files and folders that the notebook names. So a build executes only notebooks
whose outputs may have changed.

The site offers each notebook as notebooks/NAME.ipynb: with its outputs, without
hidden cells, and with a first cell that sets up the laboratory.
"""

from collections.abc import Iterator
import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
import re
import sys
from typing import Any

ROOT = Path(__file__).parent.parent

_KERNEL = re.compile(r"\A---\n.*?^kernelspec:\n  name: python3\n", re.M | re.S)
_NAMED = re.compile(r"""["']([\w./-]+)["']""")
_NOT_IMPORTED = ("docs", "tests", "runs", "data")
"""Folders that no module of the laboratory imports."""


def setup(app: Any) -> dict[str, bool]:
  """Connects the hooks, after those of `docs.pages`."""
  app.connect("source-read", add_key, priority=900)
  app.connect("html-page-context", add_link)
  app.connect("build-finished", write_files)
  return {"parallel_read_safe": False}


def add_key(app: Any, docname: str, content: list[str]) -> None:
  """Adds the digest of `key` to the display name of a notebook's kernel."""
  del app, docname
  text = content[0]
  if header := _KERNEL.match(text):
    kernel = f"kernelspec:\n  {{name: python3, display_name: {key(text)}}}\n"
    start = header[0].partition("kernelspec:")[0]
    content[0] = start + kernel + text[header.end() :]


def add_link(
  app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
  """Adds a download link below the heading of a notebook's page."""
  del app, template
  page = ROOT / "docs" / f"{pagename}.md"
  if doctree and page.is_file() and _KERNEL.match(page.read_text("utf-8")):
    root, name = "../" * pagename.count("/"), page.stem
    link = f'<a href="{root}notebooks/{name}.ipynb" download>Download this page as a notebook</a>'
    heading, end, body = context["body"].partition("</h1>")
    context["body"] = f"{heading}{end}\n<p>{link}</p>{body}"


_SETUP = """\
# Run this notebook at the root of a checkout in which `make setup` or
# `pip install ".[lab]"` was run. On Colab (untested) this cell clones one.
import sys

if "google.colab" in sys.modules:
  !git clone --quiet {repository} checkout
  %cd checkout
  %pip install --quiet ".[lab]"
"""


def write_files(app: Any, exception: Exception | None) -> None:
  """Writes notebooks/NAME.ipynb for each notebook of the site."""
  if exception or app.builder.format != "html":
    return
  folder = Path(app.outdir, "notebooks")
  folder.mkdir(exist_ok=True)
  for docname in sorted(app.env.found_docs):
    path = Path(app.outdir).parent / "jupyter_execute" / f"{docname}.ipynb"
    page = ROOT / "docs" / f"{docname}.md"
    # The folder may contain notebooks of deleted pages.
    if path.exists() and _KERNEL.match(page.read_text("utf-8")):
      notebook = json.loads(path.read_text("utf-8"))
      text = json.dumps(download(notebook, app.config.repository), indent=1)
      (folder / path.name).write_text(text, "utf-8")


def download(notebook: dict[str, Any], repository: str) -> dict[str, Any]:
  """Returns the file that readers download for an executed notebook.

  Args:
    notebook: the content of the executed notebook.
    repository: the address from which Colab clones the laboratory.
  """
  setup = {
    "cell_type": "code",
    "execution_count": None,
    "id": "setup",
    "metadata": {},
    "outputs": [],
    "source": _SETUP.format(repository=repository),
  }
  cells = [
    cell
    for cell in notebook["cells"]
    if "remove-cell" not in cell["metadata"].get("tags", ())
  ]
  kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
  metadata = {"kernelspec": kernel}
  return notebook | {"cells": [setup, *cells], "metadata": metadata}


def key(notebook: str) -> str:
  """Returns a digest of what a notebook's outputs depend on besides its cells."""
  digest = hashlib.sha256(_laboratory())
  for name in sorted(set(_NAMED.findall(notebook))):
    path = ROOT / name
    # Notebooks write to runs/.
    if name.strip("./") and not name.startswith("runs") and path.exists():
      for file in [path] if path.is_file() else sorted(path.iterdir()):
        _add(digest, file)
  return digest.hexdigest()[:16]


@functools.cache
def _laboratory() -> bytes:
  """Returns a digest of what every notebook can import."""
  digest = hashlib.sha256(sys.version.encode())
  packages = importlib.metadata.distributions()
  digest.update(repr(sorted((x.name, x.version) for x in packages)).encode())
  for file in sorted(_files()):
    _add(digest, file)
  return digest.digest()


def _files() -> Iterator[Path]:
  yield from ROOT.glob("*.py")
  for package in ROOT.glob("[a-z]*/"):
    if package.name not in _NOT_IMPORTED:
      yield from (x for x in package.rglob("*.*") if "tests" not in x.parts)


def _add(digest: Any, file: Path) -> None:
  if file.is_file() and file.suffix != ".pyc":
    digest.update(str(file.relative_to(ROOT)).encode())
    digest.update(file.read_bytes())
