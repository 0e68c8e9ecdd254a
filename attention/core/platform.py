"""What is known of devices; no other module tells one kind from another.

Three facts are kept here.

  tile_bytes      how many bytes of scores are worked on at once. A CPU takes
                  one tile after another, each about the size of its cache. A
                  GPU or TPU takes many tiles at once, as one batched step,
                  because a long loop of small steps would leave it idle. The
                  number does not depend on T, so memory stays linear in T.
  least_rows      the fewest rows of a product that runs at full rate.
  apart           where XLA must not join two operations.

All are chosen while a program is traced, from the default device. A program
that is traced on one kind of machine for another names the other one:

    with platform.tracing_for("gpu"):
      jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))

How the numbers were found is in benchmarks/README.md.
"""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import NamedTuple

import jax
from jaxtyping import Array, Float


class Profile(NamedTuple):
  """One kind of device.

  Attributes:
    tile_bytes: scores that are worked on at once.
    least_rows: rows of a tile, at least.
    needs_barriers: XLA folds a transposition into the product that reads it,
      and the product then misses the fast kernel.
    batches_blocks: blocks of a size that suits a CPU are taken many at once.
  """

  tile_bytes: int
  least_rows: int
  needs_barriers: bool
  batches_blocks: bool


CPU = Profile(
  tile_bytes=2**21, least_rows=512, needs_barriers=True, batches_blocks=False
)
ACCELERATOR = Profile(
  tile_bytes=2**29, least_rows=512, needs_barriers=False, batches_blocks=True
)

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


def name() -> str:
  """'cpu', 'gpu' or 'tpu': where the program being traced will run."""
  return _CHOSEN.get() or jax.default_backend()


def profile() -> Profile:
  """The profile of `name()`."""
  return CPU if name() == "cpu" else ACCELERATOR


def tiles_at_once(tile_bytes: int, count: int) -> int:
  """How many of `count` tiles of so many bytes each are one step."""
  return min(max(profile().tile_bytes // tile_bytes, 1), count)


def blocks_at_once(block_bytes: int, count: int) -> int:
  """How many of `count` blocks are one step; of a CPU's size, so one there."""
  if not profile().batches_blocks:
    return 1
  return tiles_at_once(block_bytes, count)


def rows_at_once(row_bytes: int, length: int) -> int:
  """How many of `length` rows, each with so many bytes of scores, are a tile."""
  chosen = profile()
  rows = max(chosen.tile_bytes // row_bytes, chosen.least_rows)
  return min(rows, length)


def apart(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """`x`, kept apart on a CPU from the operation that reads it."""
  return jax.lax.optimization_barrier(x) if profile().needs_barriers else x
