"""Former name of `attention.checks`, until 1.0."""

from typing import Any
import warnings

from attention import checks


def __getattr__(name: str) -> Any:
  """What `attention.checks` has, with a DeprecationWarning."""
  value = getattr(checks, name)
  told = f"attention.arguments.{name} is attention.checks.{name} now"
  warnings.warn(told, DeprecationWarning, stacklevel=2)
  return value
