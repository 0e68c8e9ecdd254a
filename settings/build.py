"""Builds frozen, validated config dataclasses from user input.

`build` converts any mapping (an `ml_collections.ConfigDict` or parsed JSON) to a
pydantic or standard dataclass; `to_mapping` is its inverse. Pydantic validates the
sections and fields as JSON, in which a list is a tuple and a mapping is a dataclass.
This module converts its error to one line.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
import typing
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from settings.errors import ConfigError
from settings.field_values import plain
from settings.fields import STRICT, error_line, field_path, first_error
from settings.suggest import did_you_mean

T = TypeVar("T")

_FLOAT32_END = 2.0**128
"""The absolute value of every float32 is below it."""

_FLOAT32_TINY = 2.0**-126
"""The smallest normal float32; XLA may replace smaller numbers by 0."""

_JSON_TYPES = (bool, int, float, str, type(None), dict, list)
"""Types of nearly all values, which `plain` returns as they are."""


class UnknownFieldError(ConfigError):
  """A config field that its section does not have.

  Attributes:
    field: its full name; for an unknown section with one field, the name of this field.
    hint: "did you mean 'b'?", or all names if none is similar.
  """

  def __init__(self, field: str, value: Any, known: Sequence[str]):
    self.hint = did_you_mean(field.rpartition(".")[2], known)
    while hasattr(value, "items") and len(value) == 1:
      [(name, value)] = value.items()
      field += f".{name}"
    self.field = field
    super().__init__(f"{field}: unknown; {self.hint}")


def build(
  dataclass_type: type[T],
  mapping: Mapping[str, Any],
  path: str = "config",
  typed: Mapping[str, Any] | None = None,
) -> T:
  """Converts a mapping to a frozen dataclass and checks every field.

  Args:
    dataclass_type: a dataclass; a nested dataclass is a section.
    mapping: fields and sections.
    path: the path of the mapping; messages start with it.
    typed: the mapping that the user typed, if `mapping` has more sections.

  Raises:
    UnknownFieldError: a key is unknown; the message has the most similar known key.
    ConfigError: a key is missing, a value has a wrong type, or `dataclass_type`
      rejects it.
  """
  check_section(path, mapping)
  fields = _plain(mapping, path)
  try:
    return _adapter(dataclass_type).validate_json(json.dumps(fields))
  except ValidationError as error:
    first = first_error(error)
    typed = fields if typed is None else _plain(typed, path)
    if first["type"] == "unexpected_keyword_argument":
      known = _known_fields(dataclass_type, first["loc"])
      field = field_path(path, first, typed)
      raise UnknownFieldError(field, first["input"], known) from None
    raise ConfigError(error_line(error, path, typed)) from error


@functools.cache
def _adapter(dataclass_type: Any) -> TypeAdapter:
  # In a union, the config applies to standard dataclasses, too.
  return TypeAdapter(dataclass_type | None, config=STRICT)


def _plain(value: Any, path: str) -> Any:
  """Converts user input to plain JSON values.

  In Python code, numbers may be NumPy or JAX scalars, lists may be arrays or ranges,
  and texts may be paths.
  """
  if type(value) not in _JSON_TYPES:
    value = plain(value)
  if isinstance(value, os.PathLike):
    value = os.fspath(value)
  if dataclasses.is_dataclass(value):
    value = to_mapping(value)
  if hasattr(value, "items"):
    for name in value:
      if not isinstance(name, str):
        raise ConfigError(
          f"{path}: expected fields named by text, got {name!r}"
        )
    return {name: _plain(x, f"{path}.{name}") for name, x in value.items()}
  if isinstance(value, list | tuple | range):
    return [_plain(x, f"{path}[{i}]") for i, x in enumerate(value)]
  if not isinstance(value, bool | int | float | str | None):
    raise ConfigError(
      f"{path}: expected a number, text, true, false or a list, got {value!r}"
    )
  if isinstance(value, str) and not _is_unicode(value):
    raise ConfigError(f"{path}: expected a text in UTF-8, got {value!r}")
  if isinstance(value, int | float) and (
    0 < abs(value) < _FLOAT32_TINY or _FLOAT32_END <= abs(value) < math.inf
  ):
    raise ConfigError(
      f"{path}: expected a number in the range of float32, got {value}"
    )
  return value


def _is_unicode(text: str) -> bool:
  """Returns whether a text, such as a typed path, is valid Unicode."""
  return not any("\ud800" <= character <= "\udfff" for character in text)


def _known_fields(section: Any, location: Sequence[Any]) -> list[str]:
  """Returns the field names of the section that has an unknown field."""
  for name in location[:-1]:
    hint = _hints(section).get(name)
    section = _section(hint) or section
  return [name for name in _hints(section) if name != _rest(section)]


def to_mapping(config: Any) -> dict[str, Any]:
  """Converts a dataclass to plain, JSON-ready dictionaries; inverts `build`."""
  mapping = {
    name: _json(getattr(config, name)) for name in _hints(type(config))
  }
  rest = _rest(type(config))
  return mapping if rest is None else mapping | mapping.pop(rest)


def check_section(path: str, mapping: Any) -> None:
  """Raises ConfigError if `path` does not have named fields."""
  if not hasattr(mapping, "items"):
    raise ConfigError(f"{path}: expected named fields, got {mapping!r}")


def field_names(dataclass_type: Any, prefix: str = "") -> Iterator[str]:
  """Yields the full name of every field of a config, such as 'optimizer.name'."""
  for name, hint in _hints(dataclass_type).items():
    section = _section(hint)
    if section and section in (hint, *typing.get_args(hint)):
      yield from field_names(section, f"{prefix}{name}.")
    elif not _is_mapping(hint):
      yield prefix + name


def _json(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_mapping(value)
  if isinstance(value, Mapping):
    return dict(value)
  if isinstance(value, tuple):
    return [_json(item) for item in value]
  return value


@functools.cache
def _hints(dataclass_type: Any) -> dict[str, Any]:
  """Maps field names to their types, including `Annotated` metadata."""
  hints = typing.get_type_hints(dataclass_type, include_extras=True)
  return {x.name: hints[x.name] for x in dataclasses.fields(dataclass_type)}


def _is_mapping(hint: Any) -> bool:
  return typing.get_origin(hint) in (Mapping, dict)


def _rest(dataclass_type: Any) -> str | None:
  """Returns the field that collects keys that are not field names."""
  hints = _hints(dataclass_type)
  return next((x for x in reversed(hints) if _is_mapping(hints[x])), None)


def _section(hint: Any) -> Any:
  """Returns the dataclass in a type such as `Config | tuple[Config, ...] | None`."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return hint
  inner = map(_section, typing.get_args(hint))
  return next((section for section in inner if section), None)
