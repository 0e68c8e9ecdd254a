"""Keys of executed notebooks, so that a build runs only those that changed.

jupyter-cache knows a notebook by the code of its cells and by its kernel. The name
that is shown of the kernel gets a digest of all else that an output depends on: the
laboratory's files, the versions of installed packages, and the files and folders
that the notebook names.
"""

from collections.abc import Iterator
import functools
import hashlib
import importlib.metadata
from pathlib import Path
import re
import sys
from typing import Any

ROOT = Path(__file__).parent.parent

_KERNEL = re.compile(r"\A---\n.*?^kernelspec:\n  name: python3\n", re.M | re.S)
_NAMED = re.compile(r"""["']([\w./-]+)["']""")
_APART = ("docs", "tests", "runs", "data")
"""Folders that no program of the laboratory imports."""


def setup(app: Any) -> dict[str, bool]:
  """Connects the hook, behind that of `docs.pages`."""
  app.connect("source-read", add_key, priority=900)
  return {"parallel_read_safe": False}


def add_key(app: Any, docname: str, content: list[str]) -> None:
  """Adds the digest of what a notebook depends on to its kernel."""
  del app, docname
  text = content[0]
  if found := _KERNEL.match(text):
    kernel = f"kernelspec:\n  {{name: python3, display_name: {key(text)}}}\n"
    head = found[0].partition("kernelspec:")[0]
    content[0] = head + kernel + text[found.end() :]


def key(notebook: str) -> str:
  """The digest of what the outputs of a notebook depend on, but for its cells."""
  digest = hashlib.sha256(_laboratory())
  for name in sorted(set(_NAMED.findall(notebook))):
    path = ROOT / name
    # What a notebook writes is in runs/.
    if name.strip("./") and not name.startswith("runs") and path.exists():
      for file in [path] if path.is_file() else sorted(path.iterdir()):
        _add(digest, file)
  return digest.hexdigest()[:16]


@functools.cache
def _laboratory() -> bytes:
  """The digest of what every notebook can import."""
  digest = hashlib.sha256(sys.version.encode())
  packages = importlib.metadata.distributions()
  digest.update(repr(sorted((x.name, x.version) for x in packages)).encode())
  for file in sorted(_files()):
    _add(digest, file)
  return digest.digest()


def _files() -> Iterator[Path]:
  yield from ROOT.glob("*.py")
  for package in ROOT.glob("[a-z]*/"):
    if package.name not in _APART:
      yield from (x for x in package.rglob("*.*") if "tests" not in x.parts)


def _add(digest: Any, file: Path) -> None:
  if file.is_file() and file.suffix != ".pyc":
    digest.update(str(file.relative_to(ROOT)).encode())
    digest.update(file.read_bytes())
