"""Checks that a dataclass makes of its own fields."""

from typing import Any


def check(config: Any, name: str, valid: bool, expected: str) -> None:
  """Raises a ValueError that begins with the field's name.

  Args:
    config: has the field.
    name: of the field.
    valid: whether its value is.
    expected: what would be, for the message.

  Raises:
    ValueError: it is not valid.
  """
  if not valid:
    raise ValueError(
      f"{name}: expected {expected}, got {getattr(config, name)!r}"
    )
