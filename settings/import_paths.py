"""Tables of objects that are imported on access."""

from collections.abc import Callable, Iterator, Mapping
import importlib
from pathlib import Path
from typing import Any

from attention.names import unknown_name

_PROJECTS = Path(__file__).parents[1] / "projects"


def load(path: str, entry: Callable[[Any, str], Any] = getattr) -> Any:
  """Imports 'package.module:attribute', and returns `entry(module, attribute)`."""
  module, _, attribute = path.partition(":")
  return entry(importlib.import_module(module), attribute)


def registered(table: str) -> dict[str, Any]:
  """Returns the entries that the projects in this checkout add to a table.

  Args:
    table: a mapping in the `__init__` of projects, such as 'TASKS'.

  Returns:
    The entries of all projects that have the table.
  """
  entries: dict[str, Any] = {}
  for file in sorted(_PROJECTS.glob("*/__init__.py")):
    project = importlib.import_module(f"projects.{file.parent.name}")
    entries |= getattr(project, table, {})
  return entries


class ImportPaths(Mapping[str, Any]):
  """A mapping from names to objects that are imported on access."""

  def __init__(
    self, paths: Mapping[str, str], entry: Callable[[Any, str], Any] = getattr
  ):
    """Maps each name to the object at 'package.module:attribute', read by `entry`."""
    self.paths, self._entry = paths, entry

  def __getitem__(self, name: str) -> Any:
    """Imports the object of a name."""
    if name not in self.paths:
      raise KeyError(unknown_name(name, self.paths))
    return load(self.paths[name], self._entry)

  def __contains__(self, name: object) -> bool:
    """Returns whether a name is known, without an import."""
    return name in self.paths

  def __iter__(self) -> Iterator[str]:
    """Iterates over the names, without an import."""
    return iter(self.paths)

  def __len__(self) -> int:
    """Returns the number of names."""
    return len(self.paths)
