"""What is known of devices; no other module tells one kind from another.

These facts are kept here.

  tile_bytes      how many bytes of scores are worked on at once. A CPU takes
                  one tile after another, the smallest whose products run at
                  full rate, which is about the size of its cache. A GPU or TPU
                  takes as many as the budget allows in one batched step,
                  because a long loop of small steps would leave it idle. The
                  number does not depend on T, so memory stays linear in T.

Products. XLA:CPU sends batched products of the forms 'bkqh,bkdh->bkqd' and
'bkqd,bkdh->bkqh' to its fast kernel and others to a slower one. Products of
blocks have one of these forms wherever they can, on every device, since other
devices do not mind.

All are chosen while a program is traced, from the default device. A program
that is traced on one kind of machine for another names the other one:

    with platform.tracing_for("gpu"):
      jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))

and one for several has a plan for each:

    jax.export.export(jax.jit(platform.portable(f)), platforms=("cpu", "cuda", "tpu"))

A batch of `jax.export` that is a symbol is planned for the largest one that its scope
allows, `symbolic_shape("b", constraints=["b <= 64"])`, and as on a CPU, a tile after
the other, where it allows any.

How the numbers were found is in benchmarks/README.md, "What made it fast".
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any, NamedTuple
import warnings

import jax

LEAST_ROWS = 512
"""The fewest rows of a product that runs at its full rate."""


DIAGONAL_ROWS = 64
"""Rows of a product of which only some diagonals are wanted."""


class Profile(NamedTuple):
  """One kind of device.

  Attributes:
    tile_bytes: scores that are worked on at once; 0 is one tile.
  """

  tile_bytes: int


CPU = Profile(tile_bytes=0)
ACCELERATOR = Profile(tile_bytes=2**29)

_CHOSEN: contextvars.ContextVar[str | None] = contextvars.ContextVar(
  "platform", default=None
)


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[None]:
  """What is traced inside is meant for 'cpu', 'gpu' or 'tpu'.

  `jax.jit` keeps what it has traced by function: wrap a function anew to trace
  it for another platform.
  """
  if name not in ("cpu", "gpu", "tpu"):
    raise ValueError(f"name: expected 'cpu', 'gpu' or 'tpu', got {name!r}")
  token = _CHOSEN.set(name)
  try:
    yield
  finally:
    _CHOSEN.reset(token)


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
  """`function` of arrays, traced for 'cpu', 'gpu' and 'tpu' into one program.

  `jax.lax.platform_dependent` takes the one of the platform that it is lowered for,
  and so does a program of `jax.export` where it is called.

  Args:
    function: `(*arrays) -> arrays`; pytrees of them as well.

  Returns:
    The same function. It is traced three times as long, and compiled as before.
  """

  def planned(name):
    def run(*arrays):
      with tracing_for(name):
        return function(*arrays)

    return run

  @functools.wraps(function)
  def run(*arrays):
    return jax.lax.platform_dependent(
      *arrays, cpu=planned("cpu"), tpu=planned("tpu"), default=planned("gpu")
    )

  return run


def name() -> str:
  """'cpu', 'gpu' or 'tpu': where the program being traced will run."""
  return _CHOSEN.get() or jax.default_backend()


def profile() -> Profile:
  """The profile of `name()`."""
  return CPU if name() == "cpu" else ACCELERATOR


def _affordable(num_bytes: int) -> int:
  """How many things of so many bytes the budget allows; any number may be a symbol."""
  if jax.export.is_symbolic_dim(num_bytes):
    num_bytes = next(x for x in _POWERS if is_at_most(num_bytes, x))
  return profile().tile_bytes // num_bytes


_POWERS = [2**i for i in range(65)]


def is_at_most(size: Any, bound: int) -> bool:
  """Whether a size is no larger than a bound, as far as a symbol tells."""
  try:
    return bound == _POWERS[-1] or size <= bound
  except jax.errors.InconclusiveDimensionOperation:
    return False


def tiles_per_step(tile_bytes: int, count: int) -> int:
  """How many of `count` tiles of so many bytes each are one step.

  As many as the budget allows, and then as few as the same number of steps needs.
  """
  most = max(_affordable(tile_bytes), 1)
  return -(-count // -(-count // most))


def rows_at_once(row_bytes: int, length: int, least: int | None = None) -> int:
  """How many of `length` rows, each with so many bytes of scores, are a tile.

  At least `least`; None is `LEAST_ROWS`.
  """
  least = LEAST_ROWS if least is None else least
  return min(max(_affordable(row_bytes), least), length)


def block(
  pair_bytes: int, rows: int, width: int, length: int, source_length: int
) -> tuple[int, int]:
  """Queries and keys of a tile that walks over all keys.

  One position more than a block has makes two blocks of little more than half of it,
  not two whole ones, which would be four times the pairs.

  Args:
    pair_bytes: what is held for one query and one key, of all heads.
    rows: the fewest queries that are fast.
    width: the fewest keys that are fast.
    length: T.
    source_length: S.

  Returns:
    Both doubled as often as the budget allows, and then evened out: as small as the
    same number of blocks allows, in multiples of 16 for vectors and matrix units.
  """
  most = _affordable(pair_bytes)
  while 4 * rows * width <= most:
    rows, width = 2 * rows, 2 * width
  sizes = []
  for size, whole in ((rows, length), (width, source_length)):
    share = -(-whole // -(-whole // size))
    sizes.append(min(-(-share // 16) * 16, size, whole))
  return sizes[0], sizes[1]


def window_rows(width: int) -> int:
  """C of a tile whose queries see `width` keys each, and the tile C − 1 more.

  Narrow windows would waste their keys on larger tiles.
  """
  return 128 if width > 256 else 64


FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
"""The flag of XLA that, set to nothing, switches the faulty fusion off."""


def has_faulty_fusion(version: str) -> bool:
  """Whether a jaxlib, as '0.10.2', compiles some products for CPUs wrongly.

  The first and the last version that were seen to do so are 0.10.2 and 0.12.0.1:
  benchmarks/README.md, "XLA:CPU's faulty fusion". Later ones have not been tried.
  """
  numbers = tuple(int(x) for x in version.split(".")[:4] if x.isdigit())
  return (0, 10, 2) <= numbers <= (0, 12, 0, 1)


def warn_of_faulty_fusion() -> None:
  """Warns where programs for this CPU may be compiled wrongly, and names the flag.

  It starts no backend: JAX computes on a CPU if `jax_platforms` says so, or if no
  plugin of an accelerator is installed.
  """
  config: Any = jax.config  # Its settings have no types.
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
