"""Reads JSON from untrusted sources."""

from collections.abc import Callable
import json
from typing import Any

_MAX_LEVELS = 100
"""The largest number of nested levels, which keeps recursive code within its stack."""


def loads(
  text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
  """`json.loads` that also raises ValueError for a text that is nested too deeply.

  Raises:
    ValueError: the text is not JSON, or has more than 100 levels.
  """
  message = f"nested deeper than {_MAX_LEVELS} levels"
  try:
    content = json.loads(text, object_hook=object_hook)
  except RecursionError:
    raise ValueError(message) from None
  level = [content] if isinstance(content, dict | list) else []
  for _ in range(_MAX_LEVELS):
    level = [
      inner
      for outer in level
      for inner in (outer.values() if isinstance(outer, dict) else outer)
      if isinstance(inner, dict | list)
    ]
    if not level:
      return content
  raise ValueError(message)
