"""What a message says about a name that is not known."""

from collections.abc import Iterable, Mapping, Sequence
import difflib
import types
from typing import Any

from attention.arguments import near

NOWHERE: Mapping[str, str] = types.MappingProxyType({})


def one_of(got: object, known: Iterable[str]) -> str:
  """The text "expected one of a, b, got 'c'; did you mean 'b'?"."""
  known = list(known)
  return (
    f"expected one of {', '.join(known)}, got {got!r}{near(str(got), known)}"
  )


def check_choices(config: Any, **choices: Sequence[str]) -> None:
  """Raises ValueError where a field is none of its choices."""
  for field, known in choices.items():
    if getattr(config, field) not in known:
      raise ValueError(f"{field}: {one_of(getattr(config, field), known)}")


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
  if hint := near(str(got), known):
    return hint.removeprefix("; ")
  for name in difflib.get_close_matches(
    str(got), list(elsewhere), n=1, cutoff=0.8
  ):
    return f"did you mean {elsewhere[name]}?"
  return f"known: {', '.join(known)}"
