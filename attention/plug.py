"""Former name of `attention.mechanism`, until 1.0."""

from typing import Any
import warnings

from attention import mechanism


def __getattr__(name: str) -> Any:
  """An attribute of `attention.mechanism`, with a DeprecationWarning."""
  value = getattr(mechanism, name)
  message = f"attention.plug.{name} is attention.mechanism.{name} now"
  warnings.warn(message, DeprecationWarning, stacklevel=2)
  return value
