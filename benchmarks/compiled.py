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

from collections.abc import Callable, Sequence
from pathlib import Path
import re
import sys
import time
from typing import Any, NamedTuple

from absl import flags

from settings.errors import ConfigError
from training import entry

TARGETS = ("h100", "v5e")

_TARGET = flags.DEFINE_enum("target", "h100", TARGETS, "what to compile for")
_ATTENTION = flags.DEFINE_list("attention", "all", "as of benchmarks.scaling")
_LENGTH = flags.DEFINE_integer("length", 16384, "T = S", lower_bound=2)


class Report(NamedTuple):
  """What is seen of one compiled program; see the module."""

  seconds: float
  temporaries: int
  trips: int
  conditionals: int
  scatters: int
  repeated: int
  sorts: int
  window: int
  gigabytes: float | None
  giga_operations: float | None


class Target(NamedTuple):
  """Where programs are compiled for.

  Attributes:
    platform: its name in `jax`.
    sharding: of arrays on its first device.
    kind: its name in `attention.platform`.
  """

  platform: str
  sharding: Any
  kind: str


def target(name: str, count: str = "1x1x1") -> Target:
  """The device `name`, described to XLA's compiler.

  Raises:
    ConfigError: the packages that compile for it are not installed.
  """
  import jax
  from jax.experimental import topologies
  import numpy as np

  if name == "h100":
    description = Path(__file__).with_name("h100.pbtxt").read_text()
    platform, kind = "cuda", "gpu"
    options = {"topology": count, "target_config": description}
    topology_name = ""
  else:
    platform = kind = "tpu"
    options, topology_name = {}, "v5e:2x2"
  try:
    topology = topologies.get_topology_desc(
      platform=platform, topology_name=topology_name, **options
    )
  except Exception as error:
    raise ConfigError(
      f"--target: compiling for {name} needs packages that are not installed here; "
      f"`make compiled` installs them ({type(error).__name__}: {error})"
    ) from error
  types = (jax.sharding.AxisType.Explicit,)
  devices = np.array(topology.devices[:1])
  mesh = jax.sharding.Mesh(devices, ("x",), axis_types=types)
  spec = jax.sharding.PartitionSpec()
  return Target(platform, jax.sharding.NamedSharding(mesh, spec), kind)


def report(
  function: Callable[..., Any], arguments: Sequence[Any], where: Target
) -> Report:
  """Compiles a function of arrays and reads its program.

  Args:
    function: is traced anew.
    arguments: pytrees of arrays or of their shapes.
    where: from `target`.
  """
  import jax

  from attention import platform

  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where.sharding),
    list(arguments),
  )
  start = time.perf_counter()
  with (
    platform.tracing_for(where.kind),
    jax.sharding.use_abstract_mesh(where.sharding.mesh.abstract_mesh),
  ):
    traced = jax.jit(lambda *arrays: function(*arrays)).trace(*shapes)
  program = traced.lower(lowering_platforms=(where.platform,)).compile()
  seconds = time.perf_counter() - start
  costs: Any = program.cost_analysis()
  memory, text = program.memory_analysis(), program.as_text()
  assert memory is not None  # Every compiler that is a target tells both.
  assert text is not None
  return Report(
    seconds=seconds,
    temporaries=memory.temp_size_in_bytes,
    **text_counts(text),
    gigabytes=costs and costs["bytes accessed"] / 1e9,
    giga_operations=costs and costs["flops"] / 1e9,
  )


def text_counts(text: str) -> dict[str, int]:
  """What a program in XLA's text holds, by the names of `Report`."""
  lines = text.splitlines()

  def having(operation):
    return [x for x in lines if re.search(rf"[\s)]{operation}\(", x)]

  trips = re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
  windows = re.findall(r"reduce-window\(.*?window=\{size=([0-9x]+)", text)
  scatters = having("scatter")
  repeated = [
    x for x in scatters if "bf16[" in x and "unique_indices=true" not in x
  ]
  sorts = having("sort") + [x for x in lines if '"__cub$DeviceRadixSort' in x]
  return {
    "trips": max(map(int, trips), default=0),
    "conditionals": len(having("conditional")),
    "scatters": len(scatters),
    "repeated": len(repeated),
    "sorts": len(sorts),
    "window": max((max(map(int, x.split("x"))) for x in windows), default=0),
  }


def main() -> None:
  """Prints a row for each program, and tells its time on standard error."""
  where = target(_TARGET.value)
  import jax

  from benchmarks import programs, scaling_tables

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


def _cells(program: Any, where: Target) -> Sequence[str]:
  from benchmarks.programs import first_line

  try:
    x = report(program.function, program.arguments, where)
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
