"""Checks an attention function against laws, and reproduces those that it breaks.

    python -m attention.testing jax.nn:dot_product_attention
    python -m attention.testing my_module:attention --layout=BNTH --names=mask=valid

The function takes query, key, value and options. `attention.testing.modules` turns
modules and layers into such functions. The exit code is 1 if a law is broken, and 2 if
the function cannot be called.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
from typing import Any

import jax

from attention.names import failure_location
from attention.testing.function import (
  OPTIONS,
  Function,
  Outcome,
  describe,
  magnitude,
  run_laws,
)


def main() -> int:
  """Parses the command line, runs the laws and prints a table of outcomes."""
  flags = _parser().parse_args()
  jax.config.update("jax_num_cpu_devices", 2)  # For `shard_map`.
  sys.path.insert(0, "")
  try:
    function = _function(flags)
    outcomes = run_laws(function, flags.laws, flags.lengths)
  except (ValueError, ImportError, AttributeError) as error:
    print(f"{flags.function}: {error}", file=sys.stderr)
    return 2
  _print(function, outcomes)
  if flags.record:
    rows = [x._asdict() for x in outcomes]
    try:
      flags.record.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    except OSError as error:
      print(f"--record: {error}", file=sys.stderr)
      return 2
  return int(any(x.status == "broken" for x in outcomes))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m attention.testing",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("function", metavar="PACKAGE.MODULE:FUNCTION")
  add("--layout", choices=("BTNH", "BNTH"), default="BTNH")
  add(
    "--names",
    type=_names,
    metavar="OPTION=NAME,…",
    help=f"the function's own names for {', '.join(OPTIONS)}; "
    "an empty name means that it has no such option",
  )
  add("--causal", choices=("always", "never"), help="if no option decides")
  add("--heads", type=_size, default=4)
  add("--head-dim", type=_size, default=8)
  add("--lengths", type=_sizes, default=(13, 131), metavar="T,…")
  add("--laws", type=lambda x: x.split(","), metavar="LAW,…")
  add("--record", type=pathlib.Path, metavar="FILE", help="results as JSON")
  return parser


def _names(text: str) -> dict[str, str]:
  options = text.split(",")
  if not all("=" in x for x in options):
    raise argparse.ArgumentTypeError(f"expected OPTION=NAME,…, got {text!r}")
  pairs = dict(x.split("=", 1) for x in options)
  for name in sorted(pairs.keys() - OPTIONS.keys()):
    raise argparse.ArgumentTypeError(f"{name!r} is not an option of the laws")
  return pairs


def _sizes(text: str) -> tuple[int, ...]:
  sizes = text.split(",")
  if not all(x.isdecimal() and int(x) > 0 for x in sizes):
    raise argparse.ArgumentTypeError(
      f"expected whole numbers of at least 1, got {text!r}"
    )
  return tuple(map(int, sizes))


def _size(text: str) -> int:
  return _sizes(text)[0]


def _function(flags: argparse.Namespace) -> Function:
  module, _, name = flags.function.partition(":")
  if not name:
    raise ValueError("expected PACKAGE.MODULE:FUNCTION")
  try:
    call: Any = importlib.import_module(module)
  except ImportError:
    raise
  except Exception as error:  # Another project's code may raise anything.
    raise ValueError(
      f"importing {module} raised {failure_location(error)}"
    ) from None
  for attribute in name.split("."):
    call = getattr(call, attribute)
  if isinstance(call, Function):
    return call
  if not callable(call):
    raise ValueError(f"expected a function, got {type(call).__name__}")
  is_causal = None if flags.causal is None else flags.causal == "always"
  function = Function(
    call,
    flags.function,
    flags.layout,
    is_causal=is_causal,
    num_heads=flags.heads,
    head_dim=flags.head_dim,
  )
  names = {**function.own_names, **(flags.names or {})}
  names = {option: own for option, own in names.items() if own}
  return dataclasses.replace(function, names=names)


def _print(function: Function, outcomes: list[Outcome]) -> None:
  causal = "always" if function.modes == (True,) else "never"
  print(
    f"{function.path}: axes {function.layout}, "
    f"causal: {'by option' if function.chooses else causal}, "
    f"options: {', '.join(sorted(function.options)) or 'none'}\n"
  )
  width = max(len(x.law) for x in outcomes)
  for x in outcomes:
    if x.status == "broken":
      result = f"BROKEN at T = {x.length}: {magnitude(x)}"
    else:
      result = "kept" if x.status == "kept" else f"does not apply: {x.reason}"
    print(f"{x.law:{width}}  {result}")
  broken = [x for x in outcomes if x.status == "broken"]
  counts = [sum(x.status == y for x in outcomes) for y in ("kept", "none")]
  print(
    f"\n{counts[0]} laws kept, {len(broken)} broken, {counts[1]} do not apply"
  )
  for x in broken:
    print(f"\n{describe(x)}")


if __name__ == "__main__":
  sys.exit(main())
