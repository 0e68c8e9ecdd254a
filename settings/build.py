"""Configs: what a user types becomes frozen, validated dataclasses.

`build` reads any mapping (an `ml_collections.ConfigDict`, parsed JSON) into a
dataclass, pydantic's or a standard one; `to_mapping` is its inverse. Pydantic
checks the values; what it has no notion of is here: a word that stands for a
section, leaves that are arguments of what a section names, and a line with the
full name of a leaf and the nearest known one.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import typing
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from settings.errors import ConfigError
from settings.fields import STRICT, fault
from settings.suggest import instead

T = TypeVar("T")

_FLOAT32_END = 2.0**128
"""What programs compute with is below it."""


class UnknownLeafError(ConfigError):
  """A leaf that its section does not have.

  Attributes:
    leaf: its full name; in an unknown section that of the leaf in it, which is
      what the user was looking for.
    hint: "did you mean 'b'?", or all names where none is like it.
  """

  def __init__(self, leaf: str, value: Any, known: Sequence[str]):
    self.hint = instead(leaf.rpartition(".")[2], known)
    while hasattr(value, "items") and len(value) == 1:
      [(name, value)] = value.items()
      leaf += f".{name}"
    self.leaf = leaf
    super().__init__(f"{leaf}: unknown; {self.hint}")


def build(
  dataclass_type: type[T], mapping: Mapping[str, Any], path: str = "config"
) -> T:
  """Turns a mapping into a frozen dataclass, checking every leaf.

  Nested mappings become nested dataclasses. The last field whose type is a
  Mapping takes every key that no other field is named after. Messages begin with
  `path`, where the mapping hangs.

  Returns:
    An instance of `dataclass_type`.

  Raises:
    ConfigError: an unknown key (with the nearest known one), a missing one, a
      wrong type, or a value that `dataclass_type` itself refuses. An unknown
      key is `UnknownLeafError`.
  """
  check_section(path, mapping)
  hints, rest = _hints(dataclass_type), _rest(dataclass_type)
  known = [name for name in hints if name != rest]
  values: dict[str, Any] = {} if rest is None else {rest: {}}
  for key, value in mapping.items():
    if not isinstance(key, str):
      raise ConfigError(f"{path}: expected leaves named by text, got {key!r}")
    if key in known:
      values[key] = _convert(hints[key], value, f"{path}.{key}")
    elif rest is None:
      raise UnknownLeafError(f"{path}.{key}", value, known)
    else:
      values[rest][key] = value
  for name in _required(dataclass_type):
    if name not in values:
      raise ConfigError(f"{path}.{name}: missing, and it has no default")
  try:
    return dataclass_type(**values)
  except ValueError as error:
    raise ConfigError(fault(error, path)) from error


def to_mapping(config: Any) -> dict[str, Any]:
  """Turns a dataclass into plain, JSON-ready dictionaries; inverts `build`."""
  mapping = {
    name: _plain(getattr(config, name)) for name in _hints(type(config))
  }
  rest = _rest(type(config))
  return mapping if rest is None else mapping | mapping.pop(rest)


def check_section(path: str, mapping: Any) -> None:
  """Raises ConfigError where there are no named leaves at `path`."""
  if not hasattr(mapping, "items"):
    raise ConfigError(f"{path}: expected named leaves, got {mapping!r}")


def leaf_names(dataclass_type: Any, prefix: str = "") -> Iterator[str]:
  """Every leaf that a config may have, by its full name: 'optimizer.name'."""
  for name, hint in _hints(dataclass_type).items():
    section = _section(hint)
    if section and section in _members(hint):
      yield from leaf_names(section, f"{prefix}{name}.")
    elif not _is_mapping(hint):
      yield prefix + name


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_mapping(value)
  if isinstance(value, Mapping):
    return dict(value)
  if isinstance(value, tuple):
    return [_plain(item) for item in value]
  return value


@functools.cache
def _hints(dataclass_type: Any) -> dict[str, Any]:
  """Field -> its type, with what `Annotated` adds."""
  hints = typing.get_type_hints(dataclass_type, include_extras=True)
  return {x.name: hints[x.name] for x in dataclasses.fields(dataclass_type)}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
  return TypeAdapter(hint, config=STRICT)


def _required(dataclass_type: Any) -> list[str]:
  """The fields without a default."""
  missing = dataclasses.MISSING
  return [
    field.name
    for field in dataclasses.fields(dataclass_type)
    if field.default is missing and field.default_factory is missing
  ]


def _is_mapping(hint: Any) -> bool:
  return typing.get_origin(hint) in (Mapping, dict)


def _rest(dataclass_type: Any) -> str | None:
  """The field that takes the keys which no field is named after."""
  hints = _hints(dataclass_type)
  return next((x for x in reversed(hints) if _is_mapping(hints[x])), None)


def _members(hint: Any) -> tuple[Any, ...]:
  """A type, or the types of a union."""
  return (hint, *typing.get_args(hint))


def _section(hint: Any) -> Any:
  """The dataclass in a type such as `Config | tuple[Config, ...] | None`."""
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return hint
  inner = map(_section, typing.get_args(hint))
  return next((section for section in inner if section), None)


def _convert(hint: Any, value: Any, path: str) -> Any:
  """Checks `value` against a type; lists become tuples, ints floats.

  A word in place of a section that is a choice by name is that choice, and
  '[a, b]' a list of them.
  """
  section, members = _section(hint), _members(hint)
  if section is None:
    return _leaf(hint, value, path)
  if isinstance(value, section) or (value is None and type(None) in members):
    return value
  if isinstance(value, str) and _required(section) == ["name"]:
    if value.startswith("[") and value.endswith("]"):
      value = [word.strip() for word in value[1:-1].split(",")]
    elif "," in value:
      raise ConfigError(
        f"{path}: several names are a list; expected [{value}], got {value!r}"
      )
    else:
      value = {"name": value}
  is_list = any(typing.get_origin(member) is tuple for member in members)
  if isinstance(value, list | tuple) and is_list:
    return tuple(
      _convert(section, item, f"{path}[{i}]") for i, item in enumerate(value)
    )
  if section not in members:
    raise ConfigError(f"{path}: expected a list, got {value!r}")
  return build(section, value, path)


def _leaf(hint: Any, value: Any, path: str) -> Any:
  try:
    typed = _adapter(hint).validate_python(_immutable(value))
  except ValidationError as error:
    raise ConfigError(fault(error, path)) from None
  if isinstance(typed, float) and abs(typed) >= _FLOAT32_END:
    raise ConfigError(
      f"{path}: expected a number that float32 holds, got {value}"
    )
  return typed


def _immutable(value: Any) -> Any:
  """Lists as tuples, and a ConfigDict as a mapping of the standard library."""
  if isinstance(value, list | tuple):
    return tuple(map(_immutable, value))
  return dict(value.items()) if hasattr(value, "items") else value
