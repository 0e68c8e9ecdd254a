"""Attention over sequences whose positions are sharded (context parallelism)."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from models.kind import Model
from models.multi_head_attention import MultiHeadAttention


def sequence_sharded(
  model: Model, mesh: jax.sharding.Mesh, axis_name: str
) -> Model:
  """Returns the model with attention computed on sequence shards.

  Each call of a mechanism gets `axis_name`, inside `jax.shard_map` along that axis; the
  compiler shards along the mesh's other axes. If the axis size does not divide a
  length, masked positions are added at the end of the sequence.

  Args:
    model: from `create`. A model without a field `attend` is returned unchanged.
    mesh: a mesh with this axis.
    axis_name: the axis along which positions are sharded.
  """
  if not hasattr(model, "attend"):
    return model
  return model.clone(attend=functools.partial(_attend, mesh, axis_name))


def _attend(
  mesh: jax.sharding.Mesh,
  axis_name: str,
  module: MultiHeadAttention,
  query: Array,
  key: Array | None,
  value: Array | None,
  *,
  inputs: Array,
  gates: Mapping[str, Array],
  **call: Any,
) -> Array:
  """Computes `apply_mechanism` by the mechanism's `apply` on shards of the arrays."""
  del inputs
  attention, variables = module.attention, module.mechanism
  if "sequence" not in attention.supports:
    raise ValueError(
      "attention: the mechanism does not support sequence-sharded inputs"
    )
  size = mesh.shape[axis_name]
  # A mechanism that computes its own keys and values has only one sequence.
  length = query.shape[1]
  source_length = length if value is None else value.shape[1]
  padding = {"query": -length % size, "key": -source_length % size}

  if any(padding.values()) and not attention.ignores_padding:
    raise ValueError(
      f"attention: the mechanism needs a length that {size} devices divide, got "
      f"{length}; padding would change its result"
    )

  def pad(array, side, axis):
    if array is None:
      return None
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padding[side])
    return jnp.pad(array, widths)

  if padding["key"] and call.get("mask") is None:
    call["mask"] = jnp.ones((1, 1, 1, source_length), bool)
  axes = {"mask": 3, "query_segment_ids": 1, "key_segment_ids": 1}
  axes |= dict.fromkeys(gates, 1)
  shards, specs, static = {}, {}, {}
  for name, option in {**call, **gates}.items():
    if name in axes and option is not None:
      axis = axes[name]
      side = "query" if name.startswith("query") else "key"
      shards[name] = pad(option, side, axis)
      specs[name] = jax.P(*[None] * axis, axis_name)
    elif name == "global_qkv" and option is not None:
      sides = zip(option, ("query", "key", "key"), strict=True)
      shards[name] = tuple(pad(x, side, 1) for x, side in sides)
      specs[name] = (jax.P(None, axis_name),) * 3
    elif isinstance(option, Array):
      shards[name], specs[name] = option, jax.P()
    else:
      static[name] = option
  rows = jax.P(None, axis_name)

  def local(variables, query, key, value, shards):
    return attention.apply(
      variables, query, key, value, axis_name=axis_name, **shards, **static
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
    pad(query, "query", 1),
    pad(key, "key", 1),
    pad(value, "key", 1),
    shards,
  )
  return out[:, :length]
