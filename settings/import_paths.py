"""Things by name, each imported where it is asked for."""

from collections.abc import Callable, Iterator, Mapping
import importlib
import importlib.util
from typing import Any


def load(path: str, entry: Callable[[Any, str], Any] = getattr) -> Any:
  """Imports what 'package.module:attribute' names: `entry(module, attribute)`."""
  module, _, attribute = path.partition(":")
  return entry(importlib.import_module(module), attribute)


class ImportPaths(Mapping[str, Any]):
  """Names, and what their import paths stand for.

  A name whose module is not in this checkout, as that of a project that was
  deleted, is not there.
  """

  def __init__(
    self, paths: Mapping[str, str], entry: Callable[[Any, str], Any] = getattr
  ):
    """Takes `name -> 'package.module:attribute'`, and `(module, attribute) -> it`."""
    self.paths, self._entry = paths, entry

  def __getitem__(self, name: str) -> Any:
    """Imports it."""
    path = self.paths[name]
    if not _is_there(path):
      raise KeyError(name)
    return load(path, self._entry)

  def __iter__(self) -> Iterator[str]:
    """Names whose modules are there."""
    for name, path in self.paths.items():
      if _is_there(path):
        yield name

  def __len__(self) -> int:
    """How many are there."""
    return sum(1 for _ in self)


def _is_there(path: str) -> bool:
  try:
    return importlib.util.find_spec(path.partition(":")[0]) is not None
  except ModuleNotFoundError:  # Not even its package.
    return False
