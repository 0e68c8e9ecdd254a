"""Configs: what a user types becomes frozen, validated dataclasses.

`build` reads any mapping (an `ml_collections.ConfigDict`, parsed JSON) into a
dataclass whose type hints say what is allowed; `to_mapping` is its inverse.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import types
import typing
from typing import Any, Literal, TypeVar, cast

from settings.errors import ConfigError
from settings.suggest import NOWHERE, instead

T = TypeVar("T")

_FLOAT32_END = 2.0**128
"""What programs compute with is below it."""


def build(
  dataclass_type: type[T],
  mapping: Mapping[str, Any],
  path: str = "config",
  elsewhere: Mapping[str, str] = NOWHERE,
) -> T:
  """Turns a mapping into a frozen dataclass, checking every leaf.

  Nested mappings become nested dataclasses. The last field whose type is a
  Mapping takes every key that no other field is named after.

  Args:
    dataclass_type: the dataclass; its type hints say what is allowed.
    mapping: leaf name → value.
    path: where the mapping hangs, for messages.
    elsewhere: last name of a leaf -> where the whole config has it, for the
      message about an unknown one: 'window' -> 'config.model.….window'.

  Returns:
    An instance of `dataclass_type`.

  Raises:
    ConfigError: an unknown key (with the nearest known one), a missing one, a
      wrong type, or a value that `dataclass_type` itself refuses.
  """
  check_section(path, mapping)
  hints = typing.get_type_hints(dataclass_type)
  fields = {f.name: f for f in dataclasses.fields(cast(Any, dataclass_type))}
  rest = _rest(dataclass_type)
  known = [name for name in fields if name != rest]
  values, extra = {}, {}
  for key, value in mapping.items():
    if not isinstance(key, str):
      raise ConfigError(f"{path}: expected leaves named by text, got {key!r}")
    if key in known:
      values[key] = _convert(hints[key], value, f"{path}.{key}", elsewhere)
    elif rest is None:
      raise ConfigError(_unknown(path, key, value, known, elsewhere))
    else:
      extra[key] = value
  if rest is not None:
    values[rest] = types.MappingProxyType(extra)
  for name, field in fields.items():
    if name not in values and _required(field):
      raise ConfigError(f"{path}.{name}: missing, and it has no default")
  try:
    return dataclass_type(**values)
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f"{path}.{error}") from error


def to_mapping(config: Any) -> dict[str, Any]:
  """Turns a dataclass into plain, JSON-ready dictionaries; inverts `build`."""
  mapping: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      mapping[field.name] = to_mapping(value)
    elif field.name == _rest(type(config)):
      mapping.update(value)
    elif isinstance(value, Mapping):
      mapping[field.name] = dict(value)
    elif isinstance(value, tuple):
      mapping[field.name] = [
        to_mapping(item) if dataclasses.is_dataclass(item) else item
        for item in value
      ]
    else:
      mapping[field.name] = value
  return mapping


def check_section(path: str, mapping: Any) -> None:
  """Raises ConfigError where there are no named leaves at `path`."""
  if not hasattr(mapping, "items"):
    raise ConfigError(f"{path}: expected named leaves, got {mapping!r}")


def leaf_names(dataclass_type: Any, prefix: str = "") -> Iterator[str]:
  """Every leaf that a config may have, by its full name: 'optimizer.name'."""
  for field, hint in typing.get_type_hints(dataclass_type).items():
    for member in typing.get_args(hint) or (hint,):
      if dataclasses.is_dataclass(member):
        yield from leaf_names(member, f"{prefix}{field}.")
        break
    else:
      if not _is_mapping(hint):
        yield prefix + field


def _unknown(
  path: str,
  key: str,
  value: Any,
  known: list[str],
  elsewhere: Mapping[str, str],
) -> str:
  """What a user should have typed in place of an unknown leaf or section."""
  names = [key]
  # In a section that is unknown, its leaf is what the user was looking for.
  while hasattr(value, "items") and len(value) == 1:
    [(name, value)] = value.items()
    names.append(str(name))
  if names[-1] in elsewhere:
    there = f"{names[-1]} is {elsewhere[names[-1]]}"
  else:
    there = instead(key, known, elsewhere)
  return f"{path}.{'.'.join(names)}: unknown; {there}"


def _is_mapping(hint: Any) -> bool:
  return (typing.get_origin(hint) or hint) in (Mapping, dict)


def _rest(dataclass_type: Any) -> str | None:
  """The field that takes the keys which no field is named after."""
  hints = typing.get_type_hints(dataclass_type)
  names = [field.name for field in dataclasses.fields(dataclass_type)]
  return next((n for n in reversed(names) if _is_mapping(hints[n])), None)


def _required(field: dataclasses.Field) -> bool:
  return (
    field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  )


def _convert(
  hint: Any, value: Any, path: str, elsewhere: Mapping[str, str]
) -> Any:
  """Checks `value` against a type hint; lists become tuples, ints floats.

  A word in place of a section that is a choice by name is that choice.
  """
  if dataclasses.is_dataclass(hint):
    if isinstance(value, hint):
      return value
    if isinstance(value, str) and _is_choice(hint):
      value = {"name": value}
    return build(hint, value, path, elsewhere)
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return _convert_union(hint, arguments, value, path, elsewhere)
  if origin is tuple:
    if isinstance(value, (list, tuple)):
      if arguments[-1] is Ellipsis:
        arguments = arguments[:1] * len(value)
      if len(arguments) == len(value):
        return tuple(
          _convert(h, v, f"{path}[{i}]", elsewhere)
          for i, (h, v) in enumerate(zip(arguments, value, strict=True))
        )
  elif origin is Literal:
    if value in arguments:
      return value
  elif hint is Any:
    return value
  elif _is_mapping(hint):
    if hasattr(value, "items"):
      return types.MappingProxyType(dict(value.items()))
    raise ConfigError(f"{path}: expected named leaves, got {value!r}")
  elif hint is float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
      try:
        number = float(value)
      except OverflowError:  # An int beyond every float.
        number = math.inf
      if not math.isfinite(number):
        raise ConfigError(f"{path}: expected a finite number, got {value}")
      if abs(number) >= _FLOAT32_END:
        raise ConfigError(
          f"{path}: expected a number that float32 holds, got {value}"
        )
      return number
  elif isinstance(value, hint) and (hint is bool or type(value) is not bool):
    return value
  raise ConfigError(f"{path}: expected {_describe(hint)}, got {value!r}")


def _convert_union(
  hint: Any,
  members: tuple[Any, ...],
  value: Any,
  path: str,
  elsewhere: Mapping[str, str],
) -> Any:
  if value is None and type(None) in members:
    return None
  members = tuple(m for m in members if m is not type(None))
  # What a value looks like decides, so that a fault inside it is told in full.
  if isinstance(value, str) and any(map(_is_choice, members)):
    if value.startswith("[") and value.endswith("]"):
      words = tuple(word.strip() for word in value[1:-1].split(","))
      return _convert_union(hint, members, words, path, elsewhere)
    if "," in value:
      raise ConfigError(
        f"{path}: several names are a list; expected [{value}], got {value!r}"
      )
    members = tuple(filter(_is_choice, members))
  elif hasattr(value, "items"):
    members = tuple(filter(dataclasses.is_dataclass, members)) or members
  elif isinstance(value, list | tuple):
    sections = [
      m
      for m in members
      if any(map(dataclasses.is_dataclass, typing.get_args(m)))
    ]
    members = tuple(sections) or members
  if len(members) == 1:
    return _convert(members[0], value, path, elsewhere)
  # An exact type first, so that `float | int` keeps an int as it is.
  for member in sorted(members, key=lambda m: m is not type(value)):
    try:
      return _convert(member, value, path, elsewhere)
    except ConfigError:
      pass
  raise ConfigError(f"{path}: expected {_describe(hint)}, got {value!r}")


def _is_choice(hint: Any) -> bool:
  """Whether a section is chosen by its name alone, with defaults for the rest."""
  if not dataclasses.is_dataclass(hint):
    return False
  return [f.name for f in dataclasses.fields(hint) if _required(f)] == ["name"]


def _describe(hint: Any) -> str:
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal:
    return "one of " + ", ".join(repr(a) for a in arguments)
  if origin in (typing.Union, types.UnionType):
    return " or ".join(_describe(a) for a in arguments)
  if dataclasses.is_dataclass(hint):
    return "named leaves"
  if origin is tuple:
    if arguments[-1] is ...:
      many = {int: "whole numbers", float: "numbers", str: "words"}
      return f"a list of {many.get(arguments[0], _describe(arguments[0]))}"
    inner = ", ".join(_describe(a) for a in arguments)
    return f"({inner})"
  names = {float: "a number", type(None): "None", bool: "true or false"}
  return names.get(hint, getattr(hint, "__name__", str(hint)))
