"""Properties of the kinds of devices.

`TILE_BYTES` is an accelerator's memory budget for the scores in one step. A CPU takes
one tile after another, the smallest whose products run at full rate, which is about the
size of its cache. A GPU or TPU takes as many tiles as the budget allows in one batched
step, because a long loop of small steps would leave it idle; only recurrences on a TPU
take one chunk (`recurrent.scan.chunks_per_step`). The budget does not depend on T, so
memory stays linear in T.

Products. XLA:CPU uses its fast kernel for batched products of the forms
'bkqh,bkdh->bkqd' and 'bkqd,bkdh->bkqh', and a slower one for others. Products of
blocks have one of these forms where possible, on every device; the form makes no
difference on other devices.

The properties are read from the default device while a program is traced. To trace a
program on one kind of machine for another, name the other one:

    with attention.platform.tracing_for("gpu"):
      jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))

A program for several platforms has a version for each:

    portable = attention.platform.portable(f)
    jax.export.export(jax.jit(portable), platforms=("cpu", "cuda", "tpu"))

If the batch of `jax.export` is a symbol, the tiles suit the largest batch that its
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
"""Rows of a product of which only some diagonals are needed."""

WINDOW_ROWS = 64, 128
"""Queries in a tile of a narrow window, and of a wide one. In larger tiles, most pairs
of a narrow window would be masked."""

WIDE_WINDOW = 256
"""Neighbours that a query sees in a wide window, at least."""

TILE_BYTES = 2**29
"""Bytes of scores in one step of a GPU or TPU. A CPU takes one tile in a step."""

_CHOSEN: contextvars.ContextVar[str | None] = contextvars.ContextVar(
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
  token = _CHOSEN.set(name)
  try:
    yield
  finally:
    _CHOSEN.reset(token)


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
  """Traces a function for 'cpu', 'gpu' and 'tpu' into one program.

  `jax.lax.platform_dependent` selects the version for the platform of lowering; a
  program of `jax.export` selects it when it is called.

  Args:
    function: `(*arrays) -> arrays`, also of pytrees.

  Returns:
    The same function. Tracing takes three times as long, compilation does not change.
  """

  def plan(name):
    def run(*arrays):
      with tracing_for(name):
        return function(*arrays)

    return run

  @functools.wraps(function)
  def run(*arrays):
    return jax.lax.platform_dependent(
      *arrays, cpu=plan("cpu"), tpu=plan("tpu"), default=plan("gpu")
    )

  return run


def name() -> str:
  """'cpu', 'gpu' or 'tpu': the platform for which the program is traced."""
  return _CHOSEN.get() or jax.default_backend()


def _affordable(num_bytes: int) -> int:
  """How many tiles of `num_bytes` bytes, possibly a symbol, fit into the budget."""
  if name() == "cpu":
    return 0
  if jax.export.is_symbolic_dim(num_bytes):
    num_bytes = next(x for x in _POWERS if is_at_most(num_bytes, x))
  return TILE_BYTES // num_bytes


_POWERS = [2**i for i in range(65)]


def is_at_most(size: Any, bound: int) -> bool:
  """Whether a size is certainly at most a bound; it may be a symbol."""
  try:
    return bound == _POWERS[-1] or size <= bound
  except jax.errors.InconclusiveDimensionOperation:
    return False


def tiles_per_step(tile_bytes: int, count: int) -> int:
  """The number of tiles, of `tile_bytes` bytes each, in one step.

  As many as the budget allows, reduced to what the same number of steps needs.
  """
  most = max(_affordable(tile_bytes), 1)
  return -(-count // -(-count // most))


def rows_per_tile(row_bytes: int, length: int, least: int | None = None) -> int:
  """The number of rows, with `row_bytes` bytes of scores each, in one tile.

  At least `least`, by default `LEAST_ROWS`, and at most `length`.
  """
  least = LEAST_ROWS if least is None else least
  return min(max(_affordable(row_bytes), least), length)


def block(
  pair_bytes: int, rows: int, width: int, length: int, source_length: int
) -> tuple[int, int]:
  """The numbers of queries and keys of a tile, for loops over all tiles.

  A length of one position more than a block gives two blocks of little more than half
  of it. Two whole blocks would compute four times as many pairs.

  Args:
    pair_bytes: bytes for one query and one key, over all heads.
    rows: smallest number of queries that is fast.
    width: smallest number of keys that is fast.
    length: T.
    source_length: S.

  Returns:
    Both numbers, doubled as often as the budget allows, and then balanced: as small as
    the same number of blocks allows, in multiples of 16 for vector and matrix units.
  """
  most = _affordable(pair_bytes)
  while 4 * rows * width <= most:
    rows, width = 2 * rows, 2 * width
  sizes = []
  for size, whole in ((rows, length), (width, source_length)):
    share = -(-whole // -(-whole // size))
    sizes.append(min(-(-share // 16) * 16, size, whole))
  return sizes[0], sizes[1]


FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
"""The XLA flag that switches off the faulty fusion if it is set to nothing."""


def has_faulty_fusion(version: str) -> bool:
  """Whether a jaxlib, such as '0.10.2', compiles some products for CPUs wrongly.

  The first and the last affected version that were tried are 0.10.2 and 0.12.0.1; see
  "XLA:CPU's faulty fusion" in benchmarks/README.md. Later ones have not been tried.
  """
  numbers = tuple(int(x) for x in version.split(".")[:4] if x.isdigit())
  return (0, 10, 2) <= numbers <= (0, 12, 0, 1)


def warn_of_faulty_fusion() -> None:
  """Warns if programs for this CPU may be compiled wrongly, and names the flag.

  Initialises no backend: JAX computes on a CPU if `jax_platforms` says so, or if no
  plugin of an accelerator is installed.
  """
  config: Any = jax.config  # Its settings are untyped.
  chosen = config.jax_platforms
  if chosen:
    is_cpu = chosen.split(",")[0] == "cpu"
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
