"""What a message says of a name that is not known."""

from collections.abc import Iterable
import difflib

_ABOUT_AS_LIKE = 0.05


def nearest(got: str, known: Iterable[str]) -> list[str]:
  """The name that is most like `got`, in a list; an empty one where none is.

  Of names that are about as like, the first: `dropout_rate` comes before
  `dropout_rng` in every signature. Otherwise the first that begins with it.
  """
  known = list(known)
  like = {
    name: difflib.SequenceMatcher(None, name, got).ratio()
    for name in difflib.get_close_matches(got, known)
  }
  for name in known:
    if name in like and like[name] >= max(like.values()) - _ABOUT_AS_LIKE:
      return [name]
  return [name for name in known if len(got) > 2 and name.startswith(got)][:1]


def near(got: str, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or nothing where no name is like it."""
  return "".join(f"; did you mean {name!r}?" for name in nearest(got, known))


def one_of(got: object, known: Iterable[str]) -> str:
  """The text "unknown 'c'; did you mean 'b'?", or all names where none is like it."""
  known = list(known)
  hint = near(str(got), known)
  if hint:
    return f"unknown {got!r}{hint}"
  return f"expected one of {', '.join(known)}, got {got!r}"
