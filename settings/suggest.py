"""Suggestions for unknown names in error messages."""

from collections.abc import Iterable
from pathlib import Path

from attention.names import suggestion


def did_you_mean(got: object, known: Iterable[str]) -> str:
  """Returns "did you mean 'b'?", or all names if none is similar."""
  known = list(known)
  hint = suggestion(str(got), known).removeprefix("; ")
  return hint or f"known: {', '.join(known)}"


def missing_file(path: str) -> str:
  """Returns "no such file: 'cpy.py'; did you mean 'copy.py'?"."""
  files = [str(x) for x in Path(path).parent.glob("*" + Path(path).suffix)]
  return f"no such file: {path!r}{suggestion(str(Path(path)), files)}"
