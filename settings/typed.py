"""Parses values that a user typed as text."""

import ast
from collections.abc import Mapping
from typing import Any


def split(text: str) -> list[str]:
  """Splits a text at commas that are not inside brackets.

  Brackets that enclose the whole text, as in '(0,1)' and '[0,1]', are ignored.
  """
  text = text.strip()
  if _is_enclosed(text):
    text = text[1:-1]
  parts, depth = [""], 0
  for character in text:
    depth += (character in "([") - (character in ")]")
    if character == "," and not depth:
      parts.append("")
    else:
      parts[-1] += character
  return [part.strip() for part in parts if part.strip()]


def _is_enclosed(text: str) -> bool:
  """Returns whether the last character closes a bracket that is the first."""
  depth = 0
  for i, character in enumerate(text):
    depth += (character in "([") - (character in ")]")
    if not depth:
      return i == len(text) - 1 > 0
  return False


def literal(text: str) -> Any:
  """Parses a number, truth value or tuple in Python syntax; otherwise returns the text.

  'true' and 'false' are truth values, as for any flag.
  """
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)
  # A text may be nested too deeply for the parser.
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text


def mechanism(text: str) -> tuple[str, dict[str, Any]]:
  """Parses the name and the options of 'performer:num_features=64:kernel=relu'.

  The name may be an import path, which also has a colon: 'my_module:cosine:scale=2'.

  Raises:
    ValueError: the name is missing, an option has no value, or an option is repeated.
  """
  parts = text.split(":")
  names = [part for part in parts if "=" not in part]
  options = parts[len(names) :]
  if not names or not all("=" in part for part in options):
    raise ValueError(f"expected name:option=value:option=value, got {text!r}")
  values: dict[str, Any] = {}
  for name, _, value in (part.partition("=") for part in options):
    if name.strip() in values:
      raise ValueError(f"expected {name.strip()} once, got {text!r}")
    values[name.strip()] = literal(value)
  return ":".join(names).strip(), values


def format_mechanism(name: str, options: Mapping[str, Any]) -> str:
  """Formats a mechanism so that `mechanism` can parse it."""
  return ":".join(filter(None, [name, format_options(options)]))


def format_options(options: Mapping[str, Any]) -> str:
  """Formats options as a user types them after the name of a mechanism."""
  return ":".join(f"{name}={value}" for name, value in options.items())
