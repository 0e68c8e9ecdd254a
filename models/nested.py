"""Leaves of nested configs by their own names: `rotary_theta` of `slot`.

A name that only one nested config has needs no section before it, in files, on the
command line and in Python.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeVar, cast

T = TypeVar("T")


def nest(config_type: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The leaves, with those of nested configs in their sections.

  Args:
    config_type: a dataclass; a field whose default is made by a dataclass is a
      nested config.
    leaves: by name; sections are mappings where they are there.

  Raises:
    ValueError: a leaf is there twice.
  """
  outer = dict(leaves.items())
  for section, inner in _split(config_type, outer).items():
    given = outer.get(section, {})
    if not hasattr(given, "items"):
      continue  # `build` says that it is no section.
    for name in set(given) & set(inner):
      raise ValueError(f"{name}: is there twice, also as {section}.{name}")
    outer[section] = {**given, **inner}
  return outer


def make(config_type: type[T], **leaves: Any) -> T:
  """A config from its own leaves and those of its nested configs."""
  inner = _split(config_type, leaves)
  types = _sections(config_type)
  return config_type(**leaves, **{x: types[x](**inner[x]) for x in inner})


def replace(config: T, **leaves: Any) -> T:
  """`dataclasses.replace` that takes leaves of nested configs as well."""
  inner = {
    section: dataclasses.replace(getattr(config, section), **changes)
    for section, changes in _split(type(config), leaves).items()
  }
  return dataclasses.replace(cast(Any, config), **leaves, **inner)


def _sections(config_type: Any) -> dict[str, Any]:
  """Field -> the nested config that is made for it."""
  return {
    field.name: field.default_factory
    for field in dataclasses.fields(config_type)
    if dataclasses.is_dataclass(field.default_factory)
  }


def _split(
  config_type: Any, leaves: dict[str, Any]
) -> dict[str, dict[str, Any]]:
  """Takes the leaves of nested configs out of `leaves`: section -> its own."""
  own = {field.name for field in dataclasses.fields(config_type)}
  sections = {}
  for section, kind in _sections(config_type).items():
    names = {field.name for field in dataclasses.fields(kind)} - own
    inner = {name: leaves.pop(name) for name in names & set(leaves)}
    if inner:
      sections[section] = inner
  return sections
