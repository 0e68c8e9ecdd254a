"""Types of config fields for pydantic, and one-line error messages.

    @dataclass(frozen=True, config=STRICT)  # pydantic's
    class CopyConfig:
      kind: Literal["copy", "reverse"] = "copy"
      vocab_size: Annotated[int, Ge(2)] = 32
      eval_size: Count = 1000

Types validate single fields; `__post_init__` validates combinations of fields.
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
from settings.field_values import plain

STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
"""True, '3' and 3.0 are not ints, and NaN is not a float; an int is a valid float."""

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Gt(0), Lt(1)]
Whole32 = Annotated[int, Interval(ge=0, lt=2**31)]
"""A number in the state of a run, such as a step or a seed."""
Count32 = Annotated[int, Interval(ge=1, lt=2**31)]

T = TypeVar("T")

_PHRASES = {
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
"""Maps phrases of pydantic to those of our messages."""


def error_line(
  error: ValueError, path: str = "", typed: Mapping[str, Any] | None = None
) -> str:
  """Formats the first error on one line: 'length: expected at least 1, got 0'.

  Args:
    error: the error of a dataclass.
    path: the path of the dataclass, or of one value.
    typed: the fields that a user typed; None if Python code created the dataclass.
  """
  if not isinstance(error, ValidationError):
    is_whole = isinstance(error, ConfigError) or not path
    return str(error) if is_whole else f"{path}.{error}"
  first = first_error(error)
  if typed is None:
    typed = {} if path else dict.fromkeys(first["loc"][:1])
  field = field_path(path, first, typed).lstrip(".")
  # An error of `__post_init__`, whose message starts with a field.
  if (cause := first.get("ctx", {}).get("error")) is not None:
    return error_line(cause, field).lstrip(".")
  if first["type"] == "missing":
    return f"{field}: missing, and it has no default"
  message = first["msg"]
  for phrase, replacement in _PHRASES.items():
    message = message.replace(phrase, replacement)
  line = f"{field}: {message}, got {first['input']!r}"
  if first["type"] == "literal_error":
    line += suggestion(str(first["input"]), re.findall("'(.*?)'", message))
  return line


def first_error(error: ValidationError) -> Any:
  """Returns the error of an unknown field, if any, else the most nested error."""
  return max(
    error.errors(include_url=False),
    key=lambda x: (x["type"] == "unexpected_keyword_argument", len(x["loc"])),
  )


def field_path(path: str, first: Any, typed: Any) -> str:
  """Returns the full name of the field of an error, as the user typed it."""
  for part in first["loc"]:
    if isinstance(part, int):
      path += f"[{part}]"
      typed = typed[part] if isinstance(typed, list) else ()
    elif isinstance(typed, dict) and part in typed:
      path += f".{part}"
      typed = typed[part]
    # Otherwise, the part is an omitted section or a member of a union.
  return f"{path}.{first['loc'][-1]}" if first["type"] == "missing" else path


def rest(field: str) -> Any:
  """Returns a validator that collects keys that are not field names in `field`.

  A dataclass with `options: Mapping[str, Any]` sets `_rest = rest("options")`.
  """

  def collect(config_type, values):
    if not isinstance(values, dict):  # Arguments of a Python call.
      return values
    names = {x.name for x in fields(config_type)} - {field}
    others = {name: x for name, x in values.items() if name not in names}
    return {k: x for k, x in values.items() if k in names} | {field: others}

  return model_validator(mode="before")(classmethod(collect))


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(config_type: type[T]) -> type[T]:
  """Decorates a frozen, keyword-only dataclass, so that its errors are one line.

  A wrong value raises a ValueError that starts with the field's name. A missing or an
  unknown name raises a TypeError, as in a call of any function.
  """
  checked_type: Any = dataclasses.dataclass(
    frozen=True, kw_only=True, config=STRICT
  )(config_type)
  init = checked_type.__init__
  signature = inspect.signature(checked_type)

  @functools.wraps(init)
  def checked_init(self, *args, **kwargs):
    for field in kwargs.keys() - signature.parameters.keys():
      raise TypeError(
        f"{field}: {checked_type.__name__} has no such field"
        f"{suggestion(field, signature.parameters)}"
      )
    signature.bind(*args, **kwargs)
    # Strict pydantic rejects the numbers of NumPy and JAX.
    values = {name: plain(x) for name, x in kwargs.items()}
    try:
      init(self, *args, **values)
    except ValidationError as error:
      raise ValueError(error_line(error)) from None

  checked_type.__init__ = checked_init
  return checked_type


def check(config: Any, name: str, valid: bool, expected: str) -> None:
  """Checks the value of a field.

  Raises:
    ValueError: `valid` is False; the message starts with the field's name.
  """
  if not valid:
    raise ValueError(
      f"{name}: expected {expected}, got {getattr(config, name)!r}"
    )


def check_unread(config: Any, names: Sequence[str], where: str) -> None:
  """Raises ValueError if a field that the config does not use is set."""
  defaults = {x.name: x.default for x in fields(config)}
  for name in names:
    default = defaults[name]
    expected = f"the default, {default!r}," if default else "none"
    is_unset = getattr(config, name) == default
    check(config, name, is_unset, f"{expected} where {where}")
