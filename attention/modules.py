"""Former name of `attention.flax`, until 1.0."""

from typing import Any
import warnings


def __getattr__(name: str) -> Any:
  """What `attention.flax` has, with a DeprecationWarning."""
  from attention import flax

  value = getattr(flax, name)
  told = f"attention.modules.{name} is attention.flax.{name} now"
  warnings.warn(told, DeprecationWarning, stacklevel=2)
  return value
