"""Contents of programs compiled for an H100 or a TPU, without the device.

    make compiled                                         # sets up .venv-devices; an H100
    make compiled COMPILED="--target=v5e --attention=dsa"

Every mechanism at the sizes of `benchmarks.scaling`, forward and with gradients, its
causal form where it has one. XLA compiles for a description of the device
(`training.devices.target`), so nothing is timed; what makes a program slow is visible all the same:

  s             seconds of all cores, of ptxas too, so that other work hardly matters
  trips         of the longest loop
  conditionals  branches that are taken while the program runs
  scatters      how many, and of them additions in bfloat16 to indices that may repeat
  sorts         how many
  window        positions of the widest windowed sum, which is quadratic
  GB, Gop       bytes and operations by XLA's cost analysis, a loop's body counted once;
                it has none for an H100
"""

from collections.abc import Callable, Mapping, Sequence
import resource
import sys
from typing import Any

from absl import flags

from training.commands import entry

TARGETS = {"h100": "h100", "v5e": "v5e:2x2"}
"""Device -> the smallest machine that has it."""

_TARGET = flags.DEFINE_enum("target", "h100", [*TARGETS], "what to compile for")
_ATTENTION = flags.DEFINE_list("attention", "all", "as of benchmarks.scaling")
_LENGTH = flags.DEFINE_integer("length", 16384, "T = S", lower_bound=2)


def main() -> None:
  """Prints a row for each program after it is compiled."""
  import jax

  from benchmarks import programs, scaling_tables
  from training.devices import target

  where = target.find(TARGETS[_TARGET.value])
  size = programs.Size(batch=2, heads=16, head_dim=64, dtype="bfloat16")
  print(
    f"{_TARGET.value}, jax {jax.__version__}, B, N, H = {size.batch}, {size.heads}, "
    f"{size.head_dim}, T = {_LENGTH.value:,}, {size.dtype}\n"
  )
  heads = "mechanism", "program", "s", "MiB", "trips", "conditionals"
  heads += "scatters (repeated)", "sorts", "window", "GB", "Gop"
  rules = "---", "---", *["--:"] * (len(heads) - 2)
  print(scaling_tables.table([heads, rules]), flush=True)
  for name in programs.select(_ATTENTION.value):
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
  from benchmarks.programs import first_line

  try:
    x = report(program.function, program.arguments, where)
  except Exception as error:  # A row of the table, not its end.
    return [first_line(error), *[""] * 8]
  return [
    f"{x['seconds']:.0f}",
    f"{x['temporaries'] / 2**20:,.0f}",
    f"{x['trips']:,}",
    str(x["conditionals"]),
    f"{x['scatters']} ({x['repeated']})",
    str(x["sorts"]),
    str(x["window"]),
    "–" if x["bytes"] is None else f"{x['bytes'] / 1e9:.1f}",
    "–" if x["operations"] is None else f"{x['operations'] / 1e9:,.0f}",
  ]


def report(
  function: Callable[..., Any], arguments: Sequence[Any], where: Any
) -> Mapping[str, Any]:
  """Compiles a function of arrays for one device and reads its program.

  Args:
    function: is traced anew.
    arguments: pytrees of arrays or of their shapes.
    where: from `training.devices.target`.

  Returns:
    core seconds of compiling, bytes of temporaries, `hlo.counts`, and 'bytes' and
    'operations' of XLA's cost analysis or None.
  """
  import jax
  import numpy as np

  from training.devices import hlo, target

  mesh = jax.sharding.Mesh(
    np.array(where.devices[:1]),
    ("x",),
    axis_types=(jax.sharding.AxisType.Explicit,),
  )
  one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
    list(arguments),
  )
  start = _core_seconds()
  # Pallas wants to know the mesh.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jitted = jax.jit(lambda *arrays: function(*arrays))
    program = target.compile_for(jitted, where, *shapes)
  seconds = _core_seconds() - start
  costs = program.cost_analysis() or {}
  return {
    "seconds": seconds,
    "temporaries": program.memory_analysis().temp_size_in_bytes,
    **hlo.counts(program.as_text()),
    "bytes": costs.get("bytes accessed"),
    "operations": costs.get("flops"),
  }


def _core_seconds() -> float:
  """The time of all cores for this process and its ended children."""
  whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
  return sum(resource.getrusage(x).ru_utime for x in whose)


if __name__ == "__main__":
  entry.run(main)
