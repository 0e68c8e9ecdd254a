"""Properties of CPUs, GPUs and TPUs.

`TILE_BYTES` is an accelerator's memory budget for the scores in one step. A CPU
computes one tile after another, of the smallest size whose products run at full rate,
which is about the size of its cache. A GPU or TPU computes as many tiles as the budget
allows in one batched step, because a long loop of small steps would leave it idle; only
recurrences on a TPU compute one chunk per step (`recurrent.scan.chunks_per_step`). The
budget does not depend on T, so memory stays linear in T.

XLA:CPU uses its fast kernel for batched products of the forms 'bkqh,bkdh->bkqd' and
'bkqd,bkdh->bkqh', and a slower one for others. Products of blocks have one of these
forms where possible. On other devices, the form makes no difference.

The properties are those of the default device when a program is traced. To trace a
program for another platform, name it:

    with attention.platform.tracing_for("gpu"):
      jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))

A program for several platforms has a version for each:

    portable = attention.platform.portable(f)
    jax.export.export(jax.jit(portable), platforms=("cpu", "cuda", "tpu"))

If the batch size of `jax.export` is symbolic, tiles suit the largest batch that its
scope allows, as in `symbolic_shape("b", constraints=["b <= 64"])`. Without a limit,
tiles are computed one after the other, as on a CPU.

benchmarks/README.md, "What made it fast", describes how the numbers were found.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any
import warnings

import jax

LEAST_ROWS = 512
"""The smallest number of rows with which a product runs at full rate."""

DIAGONAL_ROWS = 64
"""The number of rows of a product of which only some diagonals are needed."""

WINDOW_ROWS = 64, 128
"""The numbers of queries in a tile of a narrow and of a wide window. In larger tiles,
most pairs of a narrow window would be masked."""

WIDE_WINDOW = 256
"""The smallest number of neighbours that a query sees in a wide window."""

TILE_BYTES = 2**29
"""The bytes of scores in one step of a GPU or TPU. A CPU computes one tile per step."""

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "platform", default=None
)


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
  """A context in which functions are traced for 'cpu', 'gpu' or 'tpu'.

  `jax.jit` caches traces by function: wrap the function again to trace it for another
  platform.
  """
  if name not in ("cpu", "gpu", "tpu"):
    raise ValueError(f"name: expected 'cpu', 'gpu' or 'tpu', got {name!r}")
  token = _PLATFORM.set(name)
  try:
    yield
  finally:
    _PLATFORM.reset(token)


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
  """Traces a function for 'cpu', 'gpu' and 'tpu' into one program.

  `jax.lax.platform_dependent` selects the version for the platform of lowering; a
  program of `jax.export` selects it when it is called.

  Args:
    function: `(*arrays) -> arrays`, also of pytrees.

  Returns:
    The same function. Tracing takes three times as long; compilation does not change.
  """

  def version(name):
    def run(*arrays):
      with tracing_for(name):
        return function(*arrays)

    return run

  @functools.wraps(function)
  def run(*arrays):
    return jax.lax.platform_dependent(
      *arrays, cpu=version("cpu"), tpu=version("tpu"), default=version("gpu")
    )

  return run


def name() -> str:
  """The platform for which the program is traced: 'cpu', 'gpu' or 'tpu'."""
  return _PLATFORM.get() or jax.default_backend()


def _num_in_budget(num_bytes: int) -> int:
  """The number of tiles of `num_bytes` bytes, which may be symbolic, in the budget."""
  if name() == "cpu":
    return 0
  if jax.export.is_symbolic_dim(num_bytes):
    num_bytes = next(x for x in _POWERS if is_at_most(num_bytes, x))
  return TILE_BYTES // num_bytes


_POWERS = [2**i for i in range(65)]


def is_at_most(size: Any, bound: int) -> bool:
  """Whether a size, which may be symbolic, is certainly at most a bound."""
  try:
    return bound == _POWERS[-1] or size <= bound
  except jax.errors.InconclusiveDimensionOperation:
    return False


def tiles_per_step(tile_bytes: int, count: int) -> int:
  """The number of tiles, of `tile_bytes` bytes each, in one step.

  As many of the `count` tiles as the budget allows, divided evenly among the steps.
  """
  limit = max(_num_in_budget(tile_bytes), 1)
  return -(-count // -(-count // limit))


def rows_per_tile(row_bytes: int, length: int, least: int | None = None) -> int:
  """The number of rows, with `row_bytes` bytes of scores each, in one tile.

  At least `least`, by default `LEAST_ROWS`, and at most `length`.
  """
  least = LEAST_ROWS if least is None else least
  return min(max(_num_in_budget(row_bytes), least), length)


def block(
  pair_bytes: int, rows: int, width: int, length: int, source_length: int
) -> tuple[int, int]:
  """The numbers of queries and keys of a tile, for loops over all tiles.

  A sequence with one position more than a block is divided into two blocks of little
  more than half the size. Two whole blocks would compute four times as many pairs.

  Args:
    pair_bytes: the bytes of one query and one key, over all heads.
    rows: the smallest number of queries that is fast.
    width: the smallest number of keys that is fast.
    length: T.
    source_length: S.

  Returns:
    Both numbers, doubled as often as the budget allows, and then balanced: as small as
    the same number of blocks allows, in multiples of 16 for vector and matrix units.
  """
  limit = _num_in_budget(pair_bytes)
  while 4 * rows * width <= limit:
    rows, width = 2 * rows, 2 * width
  sizes = []
  for size, total in ((rows, length), (width, source_length)):
    share = -(-total // -(-total // size))
    sizes.append(min(-(-share // 16) * 16, size, total))
  return sizes[0], sizes[1]


FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
"""The XLA flag whose empty value disables the faulty fusion."""


def has_faulty_fusion(version: str) -> bool:
  """Whether a version of jaxlib, such as '0.10.2', miscompiles some products for CPUs.

  The first and the last version in which the fault was found are 0.10.2 and 0.12.0.1;
  see "XLA:CPU's faulty fusion" in benchmarks/README.md. Later versions were not tested.
  """
  numbers = tuple(int(x) for x in version.split(".")[:4] if x.isdigit())
  return (0, 10, 2) <= numbers <= (0, 12, 0, 1)


def warn_of_faulty_fusion() -> None:
  """Warns if programs for this CPU may be miscompiled, and names the flag.

  It initialises no backend: JAX uses the CPU if `jax_platforms` says so, or if no
  accelerator plugin is installed.
  """
  config: Any = jax.config  # Its settings are untyped.
  if platforms := config.jax_platforms:
    is_cpu = platforms.split(",")[0] == "cpu"
  else:
    plugins = "jax_plugins", "libtpu"
    is_cpu = not any(map(importlib.util.find_spec, plugins))
  is_x86 = platform.machine() in ("x86_64", "AMD64")
  has_flag = FUSION_FLAG in os.environ.get("XLA_FLAGS", "")
  version = importlib.metadata.version("jaxlib")
  if is_cpu and is_x86 and not has_flag and has_faulty_fusion(version):
    warnings.warn(
      f"jaxlib {version} compiles some products for CPUs wrongly; set "
      f"XLA_FLAGS={FUSION_FLAG}= in the environment before JAX makes its first "
      "array",
      RuntimeWarning,
      stacklevel=3,
    )
