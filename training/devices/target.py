"""Compilation for devices that this machine does not have.

XLA compiles for a description of the devices. This needs Python ≥ 3.12, jax ≥ 0.11 and
the plugins for the devices, which the project does not need otherwise; `make compiled`
and `make describe` install them.
"""

import importlib.util
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from attention.platform import backend
from settings.errors import ConfigError, one_line

EXPECTED = "h100:8, a number of GPUs on hosts of eight, or v5e:4x4"
"""The names that `find` accepts, for error messages."""

_HOST = 8


class Target(NamedTuple):
  """Devices to compile for.

  Attributes:
    devices: the devices, in the order of the machine.
    platform: their platform in `attention.platform.backend`.
    compiler: their platform in `jax`.
    memory: bytes of memory of one device.
  """

  devices: tuple[Any, ...]
  platform: str
  compiler: str
  memory: int


def find(name: str) -> Target:
  """Finds devices by name: 'h100:8' is eight GPUs, and 'v5e:4x4' is sixteen TPUs.

  Raises:
    ConfigError: the name is unknown, or the packages that compile for the devices
      are not installed.
  """
  if gpus := re.fullmatch(r"h100(?::([1-9]\d*))?", name):
    count = int(gpus[1] or 1)
    if count > _HOST and count % _HOST:
      raise ConfigError(
        f"--target: expected at most {_HOST} or a multiple of {_HOST} GPUs, "
        f"got {name!r}"
      )
    hosts = -(-count // _HOST)
    description = Path(__file__).with_name("h100.pbtxt").read_text("utf-8")
    options = {
      "topology": f"{hosts}x{count // hosts}x1",
      "target_config": description,
    }
    devices = _devices(name, "cuda", "", **options)
    return Target(devices, "gpu", "cuda", 80 * 10**9)
  if re.fullmatch(r"v5e:[1-9]\d*x[1-9]\d*", name):
    devices = _devices(name, "tpu", name)
    return Target(devices, "tpu", "tpu", 16 * 10**9)
  raise ConfigError(f"--target: expected {EXPECTED}, got {name!r}")


def _devices(name: str, compiler: str, layout: str, **options: Any) -> Any:
  _prepare()
  try:
    topology = topologies.get_topology_desc(
      platform=compiler, topology_name=layout, **options
    )
  except jax.errors.JaxRuntimeError as error:
    raise ConfigError(
      f"--target: expected {EXPECTED}, got {name!r}: {one_line(error)}"
    ) from error
  except Exception as error:
    raise ConfigError(
      f"--target: compiling for {name} needs packages that are not installed here; "
      "`make describe` and `make compiled` install them into .venv-devices "
      f"({type(error).__name__}: {one_line(error)})"
    ) from error
  return tuple(topology.devices)


def _prepare() -> None:
  """Sets the environment of the compilers: the paths of tools, and no local TPU."""
  jax.config.update("jax_platforms", "cpu")
  for variable, value in (
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_WORKER_ID", "0"),
  ):
    os.environ.setdefault(variable, value)
  if nvidia := importlib.util.find_spec("nvidia"):
    for folder in nvidia.submodule_search_locations or ():
      tools = Path(folder, "cuda_nvcc", "bin")
      os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"


def compile_for(jitted: Any, target: Target, *shapes: Any) -> Any:
  """Compiles a function of `jax.jit` for other devices.

  Args:
    jitted: the function, which must not have been traced before.
    target: the devices, from `find`.
    *shapes: the shapes of its arguments, with their shardings on those devices.
  """
  with backend.tracing_for(target.platform):
    traced = jitted.trace(*shapes)
  return traced.lower(lowering_platforms=(target.compiler,)).compile()
