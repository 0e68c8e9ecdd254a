"""What compiled programs hold, for an H100 or a TPU, on a machine that has neither.

    make compiled                                         # sets up .venv-devices; an H100
    make compiled COMPILED="--target=v5e --attention=dsa"

Every mechanism at the sizes of `benchmarks.scaling`, forward and with gradients, its
causal form where it has one. XLA compiles for a description of the device (an H100's
is h100.pbtxt), so nothing is timed; what makes a program slow is visible all the same:

  trips         of the longest loop
  conditionals  branches that are taken while the program runs
  scatters      how many, and of them additions in bfloat16 to indices that may repeat
  sorts         how many
  window        positions of the widest windowed sum, which is quadratic
  GB, Gop       bytes and operations by XLA's cost analysis, a loop's body counted once;
                it has none for an H100

Compiling wants Python ≥ 3.12, jax ≥ 0.11 and the plugins of the devices, which the
project does not need otherwise.
"""

from collections.abc import Sequence
import sys
from typing import Any

from absl import flags

from training import entry

TARGETS = ("h100", "v5e")

_TARGET = flags.DEFINE_enum("target", "h100", TARGETS, "what to compile for")
_ATTENTION = flags.DEFINE_list("attention", "all", "as of benchmarks.scaling")
_LENGTH = flags.DEFINE_integer("length", 16384, "T = S", lower_bound=2)


def main() -> None:
  """Prints a row for each program, as it is compiled."""
  import jax

  from benchmarks import hlo, programs, scaling_tables

  where = hlo.target(_TARGET.value)
  size = programs.Size(batch=2, heads=16, head_dim=64, dtype="bfloat16")
  print(
    f"{_TARGET.value}, jax {jax.__version__}, B, N, H = {size.batch}, {size.heads}, "
    f"{size.head_dim}, T = {_LENGTH.value:,}, {size.dtype}\n"
  )
  heads = "mechanism", "program", "s", "MiB", "trips", "conditionals"
  heads += "scatters (repeated)", "sorts", "window", "GB", "Gop"
  rules = "---", "---", *["--:"] * (len(heads) - 2)
  print(scaling_tables.table([heads, rules]), flush=True)
  for name in programs.chosen(_ATTENTION.value):
    parts = [
      x
      for x in programs.programs([name], size, _LENGTH.value)
      if x.part != programs.DECODE
    ]
    causal = any(x.causal for x in parts)
    for program in (x for x in parts if x.causal == causal):
      cells = _cells(program, where)
      print(scaling_tables.table([(f"`{name}`", program.part, *cells)]))
      sys.stdout.flush()


def _cells(program: Any, where: Any) -> Sequence[str]:
  from benchmarks import hlo
  from benchmarks.programs import first_line

  try:
    x = hlo.report(program.function, program.arguments, where)
  except Exception as error:  # A row of the table, not its end.
    return [first_line(error), *[""] * 8]
  return [
    f"{x.seconds:.0f}",
    f"{x.temporaries / 2**20:,.0f}",
    f"{x.trips:,}",
    str(x.conditionals),
    f"{x.scatters} ({x.repeated})",
    str(x.sorts),
    str(x.window),
    "–" if x.gigabytes is None else f"{x.gigabytes:.1f}",
    "–" if x.giga_operations is None else f"{x.giga_operations:,.0f}",
  ]


if __name__ == "__main__":
  entry.run(main)
