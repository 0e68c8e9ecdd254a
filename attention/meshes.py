"""Calls with arrays on a mesh whose axes are explicit."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


def call_with_auto_axes(
  function: Callable[..., Any],
  query: Any,
  args: tuple[Any, ...],
  options: Mapping[str, Any],
) -> Any:
  """`function(*args, **options)`, inside of which no axis of the query's is explicit.

  There the compiler chooses shardings, as on other meshes. Results are sharded as the
  query is: `[B, T, N, …]` along these axes, and all else along B.
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

  def placed(x):
    is_alike = x.shape[:3] == query.shape[:3]
    spec = (batch, length, heads) if is_alike else (batch,)
    return jax.sharding.reshard(x, PartitionSpec(*spec))

  return jax.tree.map(placed, results)
