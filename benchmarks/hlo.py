"""What a program holds that XLA compiled for a device which may not be here."""

from collections.abc import Callable, Sequence
from pathlib import Path
import re
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
import numpy as np

from attention import platform
from settings.errors import ConfigError


class Report(NamedTuple):
  """What is seen of one compiled program; see `benchmarks.compiled`."""

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


def target(name: str) -> Target:
  """The device `name`, described to XLA's compiler.

  Raises:
    ConfigError: the packages that compile for it are not installed.
  """
  if name == "h100":
    description = Path(__file__).with_name("h100.pbtxt").read_text()
    backend, kind = "cuda", "gpu"
    options = {"topology": "1x1x1", "target_config": description}
    topology_name = ""
  else:
    backend = kind = "tpu"
    options, topology_name = {}, "v5e:2x2"
  try:
    topology = topologies.get_topology_desc(
      platform=backend, topology_name=topology_name, **options
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
  return Target(backend, jax.sharding.NamedSharding(mesh, spec), kind)


def report(
  function: Callable[..., Any], arguments: Sequence[Any], where: Target
) -> Report:
  """Compiles a function of arrays and reads its program.

  Args:
    function: is traced anew.
    arguments: pytrees of arrays or of their shapes.
    where: from `target`.
  """
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
