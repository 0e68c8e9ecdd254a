"""Values that a user typed as text."""

import ast
from typing import Any


def split(text: str) -> list[str]:
  """Parts between commas, but not between those inside of brackets."""
  parts, depth = [""], 0
  for character in text:
    depth += (character in "([") - (character in ")]")
    if character == "," and not depth:
      parts.append("")
    else:
      parts[-1] += character
  return [part.strip() for part in parts if part.strip()]


def literal(text: str) -> Any:
  """A number, truth value or tuple as Python writes it; else the text itself.

  Truth values are 'true' and 'false' too, as for any flag.
  """
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
