"""Options and defaults of every mechanism, as a page read from the code.

`python -m attention.options` prints docs/mechanism_options.md, and a test keeps
the two equal.
"""

from collections.abc import Iterable
import inspect
from typing import Any

import attention
from attention import plug
from attention.registry import ATTENTIONS

_COMMON = ("mask", "is_causal", "scale")

_HEADER = """# Options of every mechanism

Generated from the code: `python -m attention.options > docs/mechanism_options.md`.

A public function takes its options by name; `mask=None`, `is_causal=False` and `scale=None`, which all of them take, are left out here.
A factory, such as `performer(num_features=256)`, makes the mechanism's record from its hyperparameters. A config gives it
the same hyperparameters by the same names, for instance `--config.model.encoder_attention.num_features=64`. The files in
`configs/` and `configs/paper/` set what the last two columns show, and leave the rest at the factory's defaults.
An option without a default has to be given. What an option means is in the docstring of its function or factory.
`retention`, `lightning`, `mamba2`, `delta`, `gated_delta`, `kimi_delta`, `comba` and `gated_delta_2` have no function of
their own: they are `gated_linear_attention` or `delta_rule_attention` with other gates. Nor has `mamba3`.

"""


def option_table() -> str:
  """A Markdown table of mechanisms (rows) and their options with defaults."""
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
    taken = inspect.signature(function).parameters if function else {}
    options = [
      p
      for p in taken.values()
      if p.kind is p.KEYWORD_ONLY and p.name not in _COMMON
    ]
    sizes = plug.example(factory).sizes
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


def page() -> str:
  """The whole of docs/mechanism_options.md."""
  return _HEADER + option_table()


def _cell(options: Iterable[tuple[str, Any]]) -> str:
  """Options as one types them, functions by name."""
  texts = [
    name
    if value is inspect.Parameter.empty
    else f"{name}={getattr(value, '__name__', repr(value))}"
    for name, value in options
  ]
  return ", ".join(f"`{text}`" for text in texts) or "–"


if __name__ == "__main__":
  print(page(), end="")
