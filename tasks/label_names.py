"""The names of labels, as a run keeps them: a label's place is its id."""

from collections.abc import Sequence
import json
import pathlib

from tasks import base

_FILE = "labels.json"


def check(names: Sequence[str], workdir: pathlib.Path | None) -> None:
  """Raises DataError where a run was begun with other names."""
  base.check_vocabulary(workdir, _FILE, _dump(names))


def save(names: Sequence[str], directory: pathlib.Path) -> None:
  """Writes what `load` reads."""
  base.save_vocabulary(directory, {_FILE: _dump(names)})


def load(workdir: pathlib.Path | None) -> list[str]:
  """Reads the names of a run, or raises DataError."""
  return json.loads(base.load_vocabulary(workdir, _FILE))


def find(names: Sequence[str], line: str) -> int:
  """The id of a label that a user typed; or ValueError."""
  if line not in names:
    raise ValueError(
      f"expected a label, one of {', '.join(names)}, got {line!r}"
    )
  return list(names).index(line)


def _dump(names: Sequence[str]) -> bytes:
  return json.dumps(list(names), ensure_ascii=False, indent=0).encode()
