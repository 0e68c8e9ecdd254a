"""Access to fields of nested configs without their section.

A field that only one nested config has, such as `rotary_theta` of `slot`, may be given
without its section in files, on the command line and in Python.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeVar, cast

T = TypeVar("T")


def nest(config_type: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Moves the fields of nested configs into their sections.

  Args:
    config_type: a dataclass; a field whose default factory is a dataclass is a nested
      config.
    fields: values by name; the value of a section is a mapping.

  Raises:
    ValueError: a field is given twice.
  """
  outer = dict(fields.items())
  for section, inner in _split(config_type, outer).items():
    value = outer.get(section, {})
    if not hasattr(value, "items"):
      continue  # `build` reports that it is not a section.
    for name in sorted(set(value) & set(inner)):
      raise ValueError(f"{name}: is given twice, also as {section}.{name}")
    outer[section] = {**value, **inner}
  return outer


def make(config_type: type[T], **fields: Any) -> T:
  """Creates a config from its own fields and those of its nested configs."""
  inner = _split(config_type, fields)
  types = _sections(config_type)
  return config_type(**fields, **{x: types[x](**inner[x]) for x in inner})


def replace(config: T, **fields: Any) -> T:
  """Replaces fields of a config and of its nested configs."""
  inner = {
    section: dataclasses.replace(getattr(config, section), **changes)
    for section, changes in _split(type(config), fields).items()
  }
  return dataclasses.replace(cast(Any, config), **fields, **inner)


def _sections(config_type: Any) -> dict[str, Any]:
  """Maps sections to the classes of their nested configs."""
  return {
    field.name: field.default_factory
    for field in dataclasses.fields(config_type)
    if dataclasses.is_dataclass(field.default_factory)
  }


def _split(
  config_type: Any, fields: dict[str, Any]
) -> dict[str, dict[str, Any]]:
  """Removes the fields of nested configs from `fields`, and groups them by section."""
  own_fields = {field.name for field in dataclasses.fields(config_type)}
  sections = {}
  for section, kind in _sections(config_type).items():
    names = {field.name for field in dataclasses.fields(kind)} - own_fields
    inner = {name: fields.pop(name) for name in sorted(names & set(fields))}
    if inner:
      sections[section] = inner
  return sections
