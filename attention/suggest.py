"""What a message says of a name that is not known."""

from collections.abc import Iterable
import difflib

_ABOUT_AS_LIKE = 0.05


def nearest(got: str, known: Iterable[str]) -> list[str]:
  """The name that is most like `got`, in a list; an empty one where none is.

  Case does not count. Of names that are about as like, the first: `dropout_rate`
  comes before `dropout_rng` in every signature. Otherwise the first that begins
  with it.
  """
  got, names = got.casefold(), {name.casefold(): name for name in known}
  if got in names:
    return [names[got]]
  like = {
    name: difflib.SequenceMatcher(None, name, got).ratio()
    for name in difflib.get_close_matches(got, names)
  }
  for name in names:
    if name in like and like[name] >= max(like.values()) - _ABOUT_AS_LIKE:
      return [names[name]]
  longer = [x for name, x in names.items() if name.startswith(got)]
  return longer[:1] if len(got) > 2 else []


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
