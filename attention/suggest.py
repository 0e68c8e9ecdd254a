"""What a message says of a name that is not known."""

from collections.abc import Iterable, Mapping
import difflib
import re

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


_TYPO = 0.85
"""How like a name is that was meant, where a few letters differ."""

_MOST = 4
"""More names than these are no suggestion."""


def meant(
  got: str, known: Iterable[str], texts: Mapping[str, str] | None = None
) -> list[str]:
  """The names that may be meant, for tables whose names share words.

  In this order: names with a few other letters; those whose text has the word as a
  name, such as that of a paper; those with the most of its words.

  Args:
    got: the name that is not known.
    known: the names that are.
    texts: name -> what is written about it.
  """
  whole = got.lower().replace("_", "").replace("-", "")
  ratios, words = {}, {}
  for name in known:
    plain = name.lower().replace("_", "")
    pair = (plain, whole) if plain == whole else (name.lower(), got.lower())
    ratios[name] = difflib.SequenceMatcher(None, *pair).ratio()
    parts = {x for x in name.lower().split("_") if len(x) > 3}
    words[name] = sum(x in whole for x in parts)
  best = max(ratios.values(), default=0.0)
  alike = [n for n in ratios if ratios[n] >= best - _ABOUT_AS_LIKE]
  word = re.compile(rf"\b{re.escape(got)}\b", re.IGNORECASE)
  found = {name: word.findall(text) for name, text in (texts or {}).items()}
  written = [name for name in found if found[name]]
  # A name always has a capital, which "full" and "softmax" have not.
  if any(x.islower() for name in written for x in found[name]):
    written = []
  most = max(words.values(), default=0)
  shared = [n for n in words if most and words[n] == most]
  choices = ([], written, shared) if best < _TYPO else (alike,)
  for names in choices:
    if 0 < len(names) <= _MOST:
      return names
  return alike[:1] if best >= 0.78 else []


def any_of(names: Iterable[str]) -> str:
  """The text "; did you mean 'a', 'b' or 'c'?", or nothing without names."""
  *others, last = map(repr, names) if (names := list(names)) else [""]
  if not last:
    return ""
  return f"; did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"


def one_of(got: object, known: Iterable[str]) -> str:
  """The text "unknown 'c'; did you mean 'b'?", or all names where none is like it."""
  known = list(known)
  hint = near(str(got), known)
  if hint:
    return f"unknown {got!r}{hint}"
  return f"expected one of {', '.join(known)}, got {got!r}"
