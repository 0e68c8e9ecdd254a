"""What a fault is."""

import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]

JUDGES = {
  "visible": "sliding_window",
  "windows": "sliding_window",
  "logits": "flash",
  "loop": "flash",
  "mods": "flash",
  "layout": "flash",
  "implementations": "flash",
  "dropout": "dense",
  "own_logits": "differential",
  "softmax": "bigbird",
  "block_selection": "nsa",
  "selected": "nsa",
  "indexer": "dsa",
  "features": "linear",
  "cache": "nsa",
  "gates": "gated_delta",
  "linear_kernels": "gated_delta",
  "recurrence": "gated_delta",
  "triangular": "gated_delta",
  "scan": "log_linear",
  "packing": "mesa",
}
"""Shared file of `attention/` -> the mechanism whose tests judge it."""


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
