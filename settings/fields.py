"""Types of config fields for pydantic, and the one-line message of an error.

    @dataclass(frozen=True, config=STRICT)  # pydantic's
    class CopyConfig:
      kind: Literal["copy", "reverse"] = "copy"
      vocab_size: Annotated[int, Ge(2)] = 32
      eval_size: Count = 1000

A type says what a field may be; `__post_init__` checks what fields must be
together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
import functools
import inspect
import re
import typing
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Interval, Lt
from pydantic import ConfigDict, ValidationError, dataclasses, model_validator

from attention.names import suggestion
from settings.errors import ConfigError

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
"""True, '3' and 3.0 are not ints, NaN is not a float; an int is a float as well."""

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Gt(0), Lt(1)]
Whole32 = Annotated[int, Interval(ge=0, lt=2**31)]
"""What the state of a run counts, and what a seed is."""
Count32 = Annotated[int, Interval(ge=1, lt=2**31)]

T = TypeVar("T")

_WORDS = {
  "Input should be": "expected",
  "greater than or equal to": "at least",
  "less than or equal to": "at most",
  "a valid tuple": "a list",
  "Tuple should have": "expected",
  " after validation, not 0": "",
  "a valid array": "a list",
  "a valid dictionary": "named fields",
  "an object": "named fields",
}
"""What pydantic says -> what a user of a config reads."""


def error_line(
  error: ValueError, path: str = "", typed: Mapping[str, Any] | None = None
) -> str:
  """One line for the first error: 'length: expected at least 1, got 0'.

  Args:
    error: of a dataclass.
    path: of it, or of one value.
    typed: the fields that a user typed; None if Python code built it.
  """
  if not isinstance(error, ValidationError):
    is_whole = isinstance(error, ConfigError) or not path
    return str(error) if is_whole else f"{path}.{error}"
  first = first_error(error)
  if typed is None:
    typed = {} if path else dict.fromkeys(first["loc"][:1])
  field = field_path(path, first, typed).lstrip(".")
  # Of `__post_init__`, whose message begins with a field.
  if (own := first.get("ctx", {}).get("error")) is not None:
    return error_line(own, field).lstrip(".")
  if first["type"] == "missing":
    return f"{field}: missing, and it has no default"
  message = first["msg"]
  for words, ours in _WORDS.items():
    message = message.replace(words, ours)
  line = f"{field}: {message}, got {first['input']!r}"
  if first["type"] == "literal_error":
    line += suggestion(str(first["input"]), re.findall("'(.*?)'", message))
  return line


def first_error(error: ValidationError) -> Any:
  """The unknown field if there is one, else the error deepest in the config."""
  return max(
    error.errors(include_url=False),
    key=lambda x: (x["type"] == "unexpected_keyword_argument", len(x["loc"])),
  )


def field_path(path: str, first: Any, typed: Any) -> str:
  """The full name of a field with an error, as the user typed it."""
  for part in first["loc"]:
    if isinstance(part, int):
      path += f"[{part}]"
      typed = typed[part] if isinstance(typed, list) else ()
    elif isinstance(typed, dict) and part in typed:
      path += f".{part}"
      typed = typed[part]
    # Else it is a section that was left out, or the member of a union.
  return f"{path}.{first['loc'][-1]}" if first["type"] == "missing" else path


def rest(field: str) -> Any:
  """A validator that collects keys which are not field names in the mapping `field`.

  A dataclass with `options: Mapping[str, Any]` sets `_rest = rest("options")`.
  """

  def fold(config_type, given):
    if not isinstance(given, dict):  # Arguments of Python.
      return given
    own = {x.name for x in fields(config_type)} - {field}
    inner = {name: x for name, x in given.items() if name not in own}
    return {k: x for k, x in given.items() if k in own} | {field: inner}

  return model_validator(mode="before")(classmethod(fold))


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(config_type: type[T]) -> type[T]:
  """Decorates a frozen, keyword-only dataclass whose errors are one line.

  An object with a wrong value is a ValueError that starts with the field's name,
  and one with a missing or an unknown name a TypeError, as of any function.
  """
  made: Any = dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)(
    config_type
  )
  init, signature = made.__init__, inspect.signature(made)

  @functools.wraps(init)
  def one_line(self, *args, **kwargs):
    for field in kwargs.keys() - signature.parameters.keys():
      raise TypeError(
        f"{field}: {made.__name__} has no such field"
        f"{suggestion(field, signature.parameters)}"
      )
    signature.bind(*args, **kwargs)
    try:
      init(self, *args, **kwargs)
    except ValidationError as error:
      raise ValueError(error_line(error)) from None

  made.__init__ = one_line
  return made


def check(config: Any, name: str, valid: bool, expected: str) -> None:
  """Raises a ValueError whose message starts with the field's name.

  Raises:
    ValueError: it is not valid.
  """
  if not valid:
    raise ValueError(
      f"{name}: expected {expected}, got {getattr(config, name)!r}"
    )


def check_unread(config: Any, names: Sequence[str], where: str) -> None:
  """Raises ValueError if a field is set that the config does not use."""
  defaults = {x.name: x.default for x in fields(config)}
  for name in names:
    unset = defaults[name]
    expected = f"the default, {unset!r}," if unset else "none"
    is_unset = getattr(config, name) == unset
    check(config, name, is_unset, f"{expected} where {where}")
