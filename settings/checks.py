"""Checks that a dataclass makes of its own fields."""

from collections.abc import Sequence
import dataclasses
from typing import Any


def check(config: Any, name: str, valid: bool, expected: str) -> None:
  """Raises a ValueError that begins with the field's name.

  Raises:
    ValueError: it is not valid.
  """
  if not valid:
    raise ValueError(
      f"{name}: expected {expected}, got {getattr(config, name)!r}"
    )


def check_unread(config: Any, names: Sequence[str], where: str) -> None:
  """Raises ValueError for a field that was set where nothing reads it."""
  defaults = {x.name: x.default for x in dataclasses.fields(config)}
  for name in names:
    unset = defaults[name]
    expected = f"the default, {unset!r}," if unset else "none"
    is_unset = getattr(config, name) == unset
    check(config, name, is_unset, f"{expected} where {where}")


def check_ranges(
  config: Any, *, counts: Sequence[str], rates: Sequence[str]
) -> None:
  """Raises ValueError for a count below 1 or a rate outside [0, 1)."""
  for field in counts:
    count = getattr(config, field)
    check(config, field, count is None or count >= 1, "at least 1")
  for field in rates:
    check(config, field, 0.0 <= getattr(config, field) < 1.0, "[0, 1)")
