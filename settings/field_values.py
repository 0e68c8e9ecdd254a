"""Nested mappings as config fields with full names, as a user types them."""

from collections.abc import Mapping
from typing import Any

from settings.errors import ConfigError

FieldValues = dict[str, Any]
"""`'model.num_layers'` -> its value."""


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> FieldValues:
  """`{'a': {'b': 1}}` to `{'a.b': 1}`; tuples become lists, as in JSON.

  Raises:
    ConfigError: a value is not a number, text, truth value or list of these.
  """
  leaves = {}
  for name, value in mapping.items():
    if hasattr(value, "items"):
      leaves.update(flatten(value, f"{prefix}{name}."))
    elif value is None or isinstance(value, (bool, int, float, str)):
      leaves[prefix + name] = value
    elif isinstance(value, (list, tuple)):
      leaves[prefix + name] = list(value)
    else:
      raise ConfigError(
        f"config.{prefix}{name}: expected a number, text, true or "
        f"false, got {value!r}"
      )
  return leaves


def put(mapping: dict[str, Any], leaf: str, value: Any) -> None:
  """Sets a field by its full name, such as 'model.num_layers'; creates sections.

  Raises:
    ConfigError: a part of the name is a field, not a section.
  """
  *sections, last = leaf.split(".")
  for depth, name in enumerate(sections, 1):
    mapping = mapping.setdefault(name, {})
    if not isinstance(mapping, dict):
      path = ".".join(sections[:depth])
      raise ConfigError(
        f"config.{leaf}: unknown; config.{path} is one value and has no fields"
      )
  mapping[last] = value
