"""Compiles programs for an H100 or a TPU, without the device, and reads them.

    make compiled                                         # sets up .venv-devices; an H100
    make compiled COMPILED="--target=v5e --attention=dsa"

It compiles every mechanism at the sizes of `benchmarks.scaling`, forward and with
gradients, in the causal form if there is one. XLA compiles for a description of the
device (`training.devices.target`), so nothing is timed, but slow operations show:

  s             CPU seconds of compilation, including ptxas
  trips         iterations of the longest loop
  conditionals  branches that the program chooses at run time
  scatters      their number, and how many add in bfloat16 to repeated indices
  sorts         their number
  window        positions of the widest windowed sum, which is quadratic
  GB, Gop       bytes and operations by XLA's cost analysis, which counts the body of a
                loop once and does not support an H100
"""

from collections.abc import Callable, Mapping, Sequence
import resource
import sys
from typing import Any

from absl import flags

from training.commands import entry

TARGETS = {"h100": "h100", "v5e": "v5e:2x2"}
"""Device -> the smallest machine with this device."""

_TARGET = flags.DEFINE_enum(
  "target", "h100", [*TARGETS], "device to compile for"
)
_ATTENTION = flags.DEFINE_list("attention", "all", "as for benchmarks.scaling")
_LENGTH = flags.DEFINE_integer("length", 16384, "T = S", lower_bound=2)


def main() -> None:
  """Compiles each program and prints its row."""
  import jax

  from benchmarks import programs, scaling_tables
  from training.devices import target

  machine = target.find(TARGETS[_TARGET.value])
  size = programs.Size(batch=2, heads=16, head_dim=64, dtype="bfloat16")
  print(
    f"{_TARGET.value}, jax {jax.__version__}, B, N, H = {size.batch}, {size.heads}, "
    f"{size.head_dim}, T = {_LENGTH.value:,}, {size.dtype}\n"
  )
  head = "mechanism", "program", "s", "MiB", "trips", "conditionals"
  head += "scatters (repeated)", "sorts", "window", "GB", "Gop"
  rule = "---", "---", *["--:"] * (len(head) - 2)
  print(scaling_tables.table([head, rule]), flush=True)
  for name in programs.select(_ATTENTION.value):
    parts = [
      x
      for x in programs.programs([name], size, _LENGTH.value)
      if x.part != programs.DECODE
    ]
    causal = any(x.causal for x in parts)
    for program in (x for x in parts if x.causal == causal):
      cells = _cells(program, machine)
      print(scaling_tables.table([(f"`{name}`", program.part, *cells)]))
      sys.stdout.flush()


def _cells(program: Any, machine: Any) -> Sequence[str]:
  from benchmarks.programs import first_line

  try:
    x = report(program.function, program.arguments, machine)
  except Exception as error:  # An error fills one row of the table.
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
  function: Callable[..., Any], arguments: Sequence[Any], machine: Any
) -> Mapping[str, Any]:
  """Compiles a function of arrays for one device and reads its program.

  Args:
    function: the function; it is traced again.
    arguments: pytrees of arrays or of their shapes.
    machine: a target of `training.devices.target`.

  Returns:
    CPU seconds of compilation, bytes of temporaries, `hlo.counts`, and 'bytes' and
    'operations' of XLA's cost analysis, or None.
  """
  import jax
  import numpy as np

  from training.devices import hlo, target

  mesh = jax.sharding.Mesh(
    np.array(machine.devices[:1]),
    ("x",),
    axis_types=(jax.sharding.AxisType.Explicit,),
  )
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    list(arguments),
  )
  start = _core_seconds()
  # Pallas needs the mesh.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jitted = jax.jit(lambda *arrays: function(*arrays))
    program = target.compile_for(jitted, machine, *shapes)
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
  """Returns the CPU seconds of this process and its finished children."""
  processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
  return sum(resource.getrusage(x).ru_utime for x in processes)


if __name__ == "__main__":
  entry.run(main)
