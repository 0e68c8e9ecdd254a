"""What a message says about a name that is not known."""

from collections.abc import Iterable
import difflib


def hint(got: object, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or nothing where no name is like it."""
  near = difflib.get_close_matches(str(got), list(known), n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


def one_of(got: object, known: Iterable[str]) -> str:
  """The text "expected one of a, b, got 'c'; did you mean 'b'?"."""
  known = list(known)
  return f"expected one of {', '.join(known)}, got {got!r}{hint(got, known)}"


def instead(got: object, known: Iterable[str]) -> str:
  """The text "did you mean 'b'?", or all names where none is like it."""
  known = list(known)
  return hint(got, known).removeprefix("; ") or f"known: {', '.join(known)}"
