"""Options and defaults of every mechanism, as a page read from the code.

`python -m attention.options` prints docs/mechanism_options.md, and a test keeps
the two equal.
"""

from collections.abc import Iterable, Mapping
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
`retention`, `mamba2`, `delta`, `gated_delta` and `kimi_delta` have no function of their own: they are `gated_linear_attention`
or `delta_rule_attention` with other gates.

"""


def option_table() -> str:
  """A Markdown table of mechanisms (rows) and their options with defaults.

  Returns:
    The table, each line with a newline at its end.
  """
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
    own = {
      option: parameter
      for option, parameter in taken.items()
      if parameter.kind is parameter.KEYWORD_ONLY and option not in _COMMON
    }
    hyperparameters = inspect.signature(factory).parameters
    sizes = plug.example(factory).sizes
    rows.append(
      [
        f"`{name}`",
        _parameters(own),
        _parameters(hyperparameters),
        _cell(_written(*item) for item in sizes.short.items()),
        _cell(_written(*item) for item in sizes.long.items()),
      ]
    )
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
  """The whole of docs/mechanism_options.md."""
  return _HEADER + option_table()


def _parameters(parameters: Mapping[str, inspect.Parameter]) -> str:
  return _cell(
    name if p.default is p.empty else _written(name, p.default)
    for name, p in parameters.items()
  )


def _written(name: str, value: Any) -> str:
  """As one types it; a function by its name."""
  return f"{name}={getattr(value, '__name__', repr(value))}"


def _cell(options: Iterable[str]) -> str:
  return ", ".join(f"`{option}`" for option in options) or "–"


if __name__ == "__main__":
  print(page(), end="")
