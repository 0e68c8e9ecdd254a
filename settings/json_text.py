"""Reads JSON from untrusted sources."""

from collections.abc import Callable
import json
from typing import Any

_DEEPEST = 100
"""Levels of a file. What walks through its content has Python's stack as its limit."""


def loads(
  text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
  """`json.loads` that also raises ValueError for a text that is nested too deeply.

  Raises:
    ValueError: it is not JSON, or has more than 100 levels.
  """
  fault = f"nested deeper than {_DEEPEST} levels"
  try:
    content = json.loads(text, object_hook=object_hook)
  except RecursionError:
    raise ValueError(fault) from None
  level = [content] if isinstance(content, dict | list) else []
  for _ in range(_DEEPEST):
    level = [
      inner
      for outer in level
      for inner in (outer.values() if isinstance(outer, dict) else outer)
      if isinstance(inner, dict | list)
    ]
    if not level:
      return content
  raise ValueError(fault)
