"""Former name of `attention.checks`, until 1.0."""

from typing import Any
import warnings

from attention import checks


def __getattr__(name: str) -> Any:
  """An attribute of `attention.checks`, with a DeprecationWarning."""
  value = getattr(checks, name)
  message = f"attention.arguments.{name} is attention.checks.{name} now"
  warnings.warn(message, DeprecationWarning, stacklevel=2)
  return value
