"""Prints the options and defaults of every mechanism.

`python -m docs.options` prints the table of docs/mechanism_options.md.
"""

from collections.abc import Iterable
import inspect
from typing import Any

import attention
from attention import mechanism as mechanisms
from attention.mechanism import ATTENTIONS

_COMMON = ("mask", "is_causal", "scale")


def page() -> str:
  """Returns a Markdown table with one row of options per mechanism."""
  rows = [
    [
      "mechanism",
      "options of the function",
      "hyperparameters of the factory, and of a config",
      "`configs/` sets",
      "`configs/paper/` sets",
    ]
  ]
  rows.append(["---"] * len(rows[0]))
  for name, factory in ATTENTIONS.items():
    function = getattr(attention, f"{name}_attention", None)
    parameters = inspect.signature(function).parameters if function else {}
    options = [
      p
      for p in parameters.values()
      if p.kind is p.KEYWORD_ONLY and p.name not in _COMMON
    ]
    sizes = mechanisms.example(factory).sizes
    rows.append(
      [
        f"`{name}`",
        _cell((p.name, p.default) for p in options),
        _cell(
          (p.name, p.default)
          for p in inspect.signature(factory).parameters.values()
        ),
        _cell(sizes.short.items()),
        _cell(sizes.long.items()),
      ]
    )
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(options: Iterable[tuple[str, Any]]) -> str:
  """Returns options as a call spells them, with functions by name."""
  texts = [
    name
    if value is inspect.Parameter.empty
    else f"{name}={getattr(value, '__name__', repr(value))}"
    for name, value in options
  ]
  return ", ".join(f"`{text}`" for text in texts) or "–"


if __name__ == "__main__":
  print(page(), end="")
