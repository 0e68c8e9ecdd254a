"""Attention of sequences whose positions lie on several devices."""

from collections.abc import Iterator
import contextlib
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from attention import Attention
from models.mechanism_variables import gate_names
from models.rows import positions_apart


@contextlib.contextmanager
def attention_in_parts(
  mesh: jax.sharding.Mesh, axis_name: str
) -> Iterator[None]:
  """Within it, attention is computed on the device that has its positions.

  Every call of a mechanism has `axis_name` inside `jax.shard_map` along one axis; the
  mesh's other axes are left to the compiler.
  Where the axis does not divide a length, positions are added at its end that
  nobody sees.

  Args:
    mesh: has the axis.
    axis_name: along which positions lie.
  """

  def intercept(following, args, kwargs, context):
    if context.method_name != "attend":
      return following(*args, **kwargs)
    module = context.module
    return _in_parts(
      module.attention, mesh, axis_name, module.mechanism, *args, **kwargs
    )

  with positions_apart(), nn.intercept_methods(intercept):
    yield


def _in_parts(
  attention: Attention,
  mesh: jax.sharding.Mesh,
  axis_name: str,
  variables: Any,
  query: Array,
  key: Array | None,
  value: Array | None,
  *,
  inputs: Array,
  **call: Any,
) -> Array:
  """`apply` on whole arrays, by `apply` on their shards."""
  if "sequence" not in attention.supports:
    raise ValueError("attention: the mechanism has no form for shards")
  size = mesh.shape[axis_name]
  # A mechanism that makes its own keys and values reads one sequence.
  length = query.shape[1]
  source_length = length if value is None else value.shape[1]
  missing = {"query": -length % size, "key": -source_length % size}

  if any(missing.values()) and not attention.ignores_padding:
    raise ValueError(
      f"attention: the mechanism needs a length that {size} devices divide, got "
      f"{length}; positions that are added would change what it does"
    )

  def padded(array, side, axis):
    if array is None:
      return None
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing[side])
    return jnp.pad(array, widths)

  if missing["key"] and call.get("mask") is None:
    call["mask"] = jnp.ones((1, 1, 1, source_length), bool)
  axes = {"mask": 3, "query_segment_ids": 1, "key_segment_ids": 1}
  axes |= dict.fromkeys(gate_names(attention, variables, inputs), 1)
  parts, specs, rest = {}, {}, {}
  for name, option in call.items():
    if name in axes and option is not None:
      axis = axes[name]
      side = "query" if name.startswith("query") else "key"
      parts[name] = padded(option, side, axis)
      specs[name] = jax.P(*[None] * axis, axis_name)
    elif name == "global_qkv" and option is not None:
      sides = zip(option, ("query", "key", "key"), strict=True)
      parts[name] = tuple(padded(x, side, 1) for x, side in sides)
      specs[name] = (jax.P(None, axis_name),) * 3
    elif isinstance(option, Array):
      parts[name], specs[name] = option, jax.P()
    else:
      rest[name] = option
  rows = jax.P(None, axis_name)

  def local(variables, query, key, value, parts):
    return attention.apply(
      variables, query, key, value, axis_name=axis_name, **parts, **rest
    )

  out = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(jax.P(), rows, rows, rows, specs),
    out_specs=rows,
    axis_names={axis_name},
    check_vma=False,
  )(
    variables,
    padded(query, "query", 1),
    padded(key, "key", 1),
    padded(value, "key", 1),
    parts,
  )
  return out[:, :length]
