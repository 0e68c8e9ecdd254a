"""Config fields by full name, as a user types them, and nested mappings."""

from collections.abc import Mapping
from typing import Any

from settings.errors import ConfigError

FieldValues = dict[str, Any]
"""Maps full names of config fields, such as 'model.num_layers', to their values."""


def plain(value: Any) -> Any:
  """Converts a number or an array of NumPy or JAX to a Python number or a list.

  Other values are returned as they are.
  """
  return value.tolist() if hasattr(value, "tolist") else value


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> FieldValues:
  """Converts `{'a': {'b': 1}}` to `{'a.b': 1}`; tuples become lists, as in JSON.

  Raises:
    ConfigError: a value is not a number, text, truth value or list of these.
  """
  fields = {}
  for name, value in mapping.items():
    if hasattr(value, "items"):
      fields.update(flatten(value, f"{prefix}{name}."))
    elif value is None or isinstance(value, (bool, int, float, str)):
      fields[prefix + name] = value
    elif isinstance(value, (list, tuple)):
      fields[prefix + name] = list(value)
    else:
      raise ConfigError(
        f"config.{prefix}{name}: expected a number, text, true or "
        f"false, got {value!r}"
      )
  return fields


def put(mapping: dict[str, Any], field: str, value: Any) -> None:
  """Sets a field by its full name, such as 'model.num_layers'; creates its sections.

  Raises:
    ConfigError: a part of the name is a field, not a section.
  """
  *sections, last = field.split(".")
  for depth, name in enumerate(sections, 1):
    mapping = mapping.setdefault(name, {})
    if not isinstance(mapping, dict):
      path = ".".join(sections[:depth])
      raise ConfigError(
        f"config.{field}: unknown; config.{path} is one value and has no fields"
      )
  mapping[last] = value
