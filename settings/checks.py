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
