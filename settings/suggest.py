"""What a message says about a name that is not known."""

from collections.abc import Iterable, Mapping
import difflib
import types

NOWHERE: Mapping[str, str] = types.MappingProxyType({})


def hint(got: object, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or nothing where no name is like it."""
  near = difflib.get_close_matches(str(got), list(known), n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


def one_of(got: object, known: Iterable[str]) -> str:
  """The text "expected one of a, b, got 'c'; did you mean 'b'?"."""
  known = list(known)
  return f"expected one of {', '.join(known)}, got {got!r}{hint(got, known)}"


def instead(
  got: object, known: Iterable[str], elsewhere: Mapping[str, str] = NOWHERE
) -> str:
  """The text "did you mean 'b'?", or all names where none is like it.

  Args:
    got: the name that is not known.
    known: names that are, in its place.
    elsewhere: names of other places -> what to call them in full.
  """
  known = list(known)
  if near := hint(got, known):
    return near.removeprefix("; ")
  for name in difflib.get_close_matches(str(got), list(elsewhere), n=1):
    return f"did you mean {elsewhere[name]}?"
  return f"known: {', '.join(known)}"
