"""Compiled programs of eager calls, cached by function, static options and shapes.

`jax.lax.scan`, `map` and `while_loop` compile again for each new Python function, and a
function that is defined inside a call is new in each call. So an eager call of
attention would compile its loops each time, which takes seconds. `cached_jit` runs an
eager call as one cached `jax.jit` program.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array
import numpy as np

from attention.platform import backend

P = ParamSpec("P")
R = TypeVar("R")

MAX_PROGRAMS = 1024
"""The largest number of cached programs, of which the least recently used are dropped.
Each has one executable per set of shapes, like any `jax.jit`."""

_ARRAY = object()
"""Replaces each array among the leaves of a call."""


def cached_jit(function: Callable[P, R]) -> Callable[P, R]:
  """Compiles `function` once for all eager calls with equal static options.

  Arrays, anywhere in the arguments, are inputs of the program; all other values are
  static. Transformations such as `jax.grad` and `jax.vmap` apply to the program as a
  whole, and their results are cached, too. In `jax.jit`, its operations become part of
  the caller's program.

  A call with a Python function among its arguments, such as a `score_mod`, is not
  cached, because the function may read variables that change between calls.

  Args:
    function: a pure function of pytrees.
  """

  @functools.wraps(function)
  def call(*args: P.args, **options: P.kwargs) -> R:
    leaves, structure = jax.tree.flatten((args, options))
    arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
    static = tuple(
      _ARRAY if isinstance(x, jax.Array | np.ndarray) else x for x in leaves
    )
    if any(map(callable, static)):
      # NumPy's arrays cannot be indexed by the traced numbers of a loop.
      leaves = [
        jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves
      ]
      args, options = structure.unflatten(leaves)
      return function(*args, **options)
    types = tuple(map(type, static))  # 1, 1.0 and True are equal.
    key = function, structure, static, types, backend.name()
    return cast(R, _program(*key)(arrays))

  return call


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def _program(function, structure, static, *_) -> Callable[[list[Any]], Any]:
  def run(arrays):
    inputs = iter(arrays)
    leaves = [next(inputs) if x is _ARRAY else x for x in static]
    args, options = structure.unflatten(leaves)
    return function(*args, **options)

  run.__name__ = run.__qualname__ = getattr(function, "__name__", "attention")
  return jax.jit(run)


def clear_cache() -> None:
  """Drops all cached programs, for tests that change values read while tracing."""
  _program.cache_clear()


def type_name(x: Any) -> str:
  """The name of the type of x in a message, 'array' also if x is traced."""
  return "array" if isinstance(x, jax.Array) else type(x).__name__


def is_traced(*arrays: Any) -> bool:
  """Whether the values of an array are unknown, such as under `jax.jit`."""
  return any(
    isinstance(x, jax.core.Tracer)
    or not getattr(x, "is_fully_addressable", True)
    for x in arrays
  )


def promote(*arrays: Array) -> list[Array]:
  """Casts arrays to their common dtype by JAX's type promotion."""
  return [x.astype(jnp.result_type(*arrays)) for x in arrays]


def axis_size(axis_name: str) -> int:
  """The number of devices along a mesh axis, inside `jax.shard_map`.

  Raises:
    ValueError: the call is not inside a `shard_map` over this axis.
  """
  try:
    return jax.lax.axis_size(axis_name)
  except NameError:
    raise ValueError(
      f"axis_name: expected a mesh axis, inside jax.shard_map over this axis, got "
      f"{axis_name!r}"
    ) from None


def call_with_auto_axes(
  function: Callable[..., Any],
  query: Any,
  args: tuple[Any, ...],
  options: Mapping[str, Any],
) -> Any:
  """Calls `function(*args, **options)` with all explicit mesh axes set to Auto.

  Inside, the compiler chooses shardings, as on other meshes. Results `[B, T, N, …]` are
  sharded like the query along these axes; all other results are sharded along B.
  """
  mesh = jax.typeof(query).sharding.mesh
  if not mesh.explicit_axes:
    return function(*args, **options)
  auto = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
  leaves, structure = jax.tree.flatten((args, dict(options)))
  with jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto)):
    leaves = [
      jax.sharding.reshard(x, PartitionSpec())
      if isinstance(x, jax.Array)
      else x
      for x in leaves
    ]
    args, options = structure.unflatten(leaves)
    results = function(*args, **options)
  batch, length, heads, _ = jax.typeof(query).sharding.spec

  def reshard(x):
    has_heads = x.shape[:3] == query.shape[:3]
    spec = (batch, length, heads) if has_heads else (batch,)
    return jax.sharding.reshard(x, PartitionSpec(*spec))

  return jax.tree.map(reshard, results)
