"""Parses values that a user typed as text."""

import ast
from collections.abc import Mapping
from typing import Any


def split(text: str) -> list[str]:
  """Splits a text at commas that are not inside brackets.

  Brackets around all of it, as in '(0,1)' and '[0,1]', are ignored.
  """
  text = text.strip()
  if _are_around(text):
    text = text[1:-1]
  parts, depth = [""], 0
  for character in text:
    depth += (character in "([") - (character in ")]")
    if character == "," and not depth:
      parts.append("")
    else:
      parts[-1] += character
  return [part.strip() for part in parts if part.strip()]


def _are_around(text: str) -> bool:
  """Whether the first character is a bracket that the last one closes."""
  depth = 0
  for i, character in enumerate(text):
    depth += (character in "([") - (character in ")]")
    if not depth:
      return i == len(text) - 1 > 0
  return False


def literal(text: str) -> Any:
  """Parses a number, truth value or tuple in Python syntax, else returns the text.

  Truth values are 'true' and 'false' too, as for any flag.
  """
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def mechanism(text: str) -> tuple[str, dict[str, Any]]:
  """The name and the options of 'performer:num_features=64:kernel=relu'.

  The name may be an import path, which has a colon of its own:
  'my_module:cosine:scale=2'.

  Raises:
    ValueError: something stands between options that is none, or one stands twice.
  """
  parts = text.split(":")
  names = [part for part in parts if "=" not in part]
  options = parts[len(names) :]
  if not names or not all("=" in part for part in options):
    raise ValueError(f"expected name:option=value:option=value, got {text!r}")
  found: dict[str, Any] = {}
  for name, _, value in (part.partition("=") for part in options):
    if name.strip() in found:
      raise ValueError(f"expected {name.strip()} once, got {text!r}")
    found[name.strip()] = literal(value)
  return ":".join(names).strip(), found


def format_mechanism(name: str, options: Mapping[str, Any]) -> str:
  """Formats a mechanism so that `mechanism` can parse it."""
  return ":".join(filter(None, [name, format_options(options)]))


def format_options(options: Mapping[str, Any]) -> str:
  """Formats options as they follow the name of a mechanism."""
  return ":".join(f"{name}={value}" for name, value in options.items())
