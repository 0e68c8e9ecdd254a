"""Types of what a config has, which pydantic checks, and the line for a fault.

    @dataclass(frozen=True, config=STRICT)  # pydantic's
    class CopyConfig:
      kind: Literal["copy", "reverse"] = "copy"
      vocab_size: Annotated[int, Ge(2)] = 32
      eval_size: Count = 1000

A type says what a field may be; `__post_init__` checks what fields must be
together.
"""

import functools
import inspect
import re
import typing
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Interval, Lt
from pydantic import ConfigDict, ValidationError, dataclasses

from attention.suggest import near
from settings.errors import ConfigError

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""True, '3' and 3.0 are no ints, NaN is no float; an int is a float as well."""

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
  "a valid dictionary": "named leaves",
}
"""What pydantic says -> what a user of a config reads."""


def fault(error: ValueError, name: str = "") -> str:
  """One line for the first fault: 'length: expected at least 1, got 0'.

  `name` is that of the dataclass, or of the value, that the error is of.
  """
  first: Any = None
  if isinstance(error, ValidationError):
    first = error.errors(include_url=False)[0]
    error = first.get("ctx", {}).get("error", error)  # Of `__post_init__`.
  if isinstance(error, ConfigError):
    return str(error)
  if not isinstance(error, ValidationError):
    return f"{name}.{error}".lstrip(".")
  # Text beyond the field is the member of a union.
  place = name or str(first["loc"][0])
  place += "".join(f"[{x}]" for x in first["loc"] if isinstance(x, int))
  message = first["msg"]
  for words, ours in _WORDS.items():
    message = message.replace(words, ours)
  line = f"{place}: {message}, got {first['input']!r}"
  if first["type"] == "literal_error":
    line += near(str(first["input"]), re.findall("'(.*?)'", message))
  return line


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(config_type: type[T]) -> type[T]:
  """Makes a frozen dataclass by keywords that tells a fault in one line.

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
        f"{near(field, signature.parameters)}"
      )
    signature.bind(*args, **kwargs)
    try:
      init(self, *args, **kwargs)
    except ValidationError as error:
      raise ValueError(fault(error)) from None

  made.__init__ = one_line
  return made
