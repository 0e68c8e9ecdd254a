"""What a fault is."""

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
"""Shared file of `attention/` -> the mechanism whose tests judge it; CONTRIBUTING.md
has the same table."""


class Mutant(NamedTuple):
  """A fault that changes what a user sees.

  Attributes:
    file: where it is planted.
    old: a text that the file has once.
    new: what takes its place.
    tests: what must fail: tests of a mechanism, of a folder, or of several files.
    name: what is wrong then.
  """

  file: str
  old: str
  new: str
  tests: str | tuple[str, ...]
  name: str


def files(folder: str, *names: str) -> tuple[str, ...]:
  """The files of tests of these names in a folder, or all of them."""
  if names:
    return tuple(f"{folder}/test_{name}.py" for name in names)
  paths = (ROOT / folder).glob("test_*.py")
  return tuple(sorted(str(path.relative_to(ROOT)) for path in paths))
