"""Former name of `attention.flax`, until 1.0."""

from typing import Any
import warnings


def __getattr__(name: str) -> Any:
  """An attribute of `attention.flax`, with a DeprecationWarning."""
  from attention import flax

  value = getattr(flax, name)
  message = f"attention.modules.{name} is attention.flax.{name} now"
  warnings.warn(message, DeprecationWarning, stacklevel=2)
  return value
