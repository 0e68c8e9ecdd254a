"""Former name of `attention.mechanism`, until 1.0."""

from typing import Any
import warnings

from attention import mechanism


def __getattr__(name: str) -> Any:
  """What `attention.mechanism` has, with a DeprecationWarning."""
  value = getattr(mechanism, name)
  told = f"attention.plug.{name} is attention.mechanism.{name} now"
  warnings.warn(told, DeprecationWarning, stacklevel=2)
  return value
