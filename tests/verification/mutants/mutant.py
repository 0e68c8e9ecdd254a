"""Defines planted faults and the tests that judge shared files."""

import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[3]

JUDGES = {
  **dict.fromkeys(("visible", "windows"), "sliding_window"),
  **dict.fromkeys(("logits", "tiles", "layout", "own_logits"), "flash"),
  **dict.fromkeys(("dropout", "rows", "cache", "forget_gates"), "dense"),
  "block_selection": "moba",
  "indexer": "dsa",
  "hashing": "lsh",
  "features": "performer",
  "scan": "window_linear",
  **dict.fromkeys(("recurrence", "arrays", "packing"), "gated_linear"),
  **dict.fromkeys(("gates", "triangular"), "gated_delta"),
}
"""Shared file of `attention/` -> the mechanism whose tests judge it.

CONTRIBUTING.md has the same table.
"""


class Mutant(NamedTuple):
  """A fault that changes what a user sees.

  Attributes:
    file: the file in which it is planted.
    old: a text that occurs once in the file.
    new: the text that replaces it.
    tests: the tests that must fail: of a mechanism, of a folder, or of several files.
    name: the wrong behavior.
  """

  file: str
  old: str
  new: str
  tests: str | tuple[str, ...]
  name: str


def files(folder: str, *names: str) -> tuple[str, ...]:
  """Returns the named test files of a folder, or all of them."""
  if names:
    return tuple(f"{folder}/test_{name}.py" for name in names)
  paths = (ROOT / folder).glob("test_*.py")
  return tuple(sorted(str(path.relative_to(ROOT)) for path in paths))
