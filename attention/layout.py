"""Blocks of arrays: cut one out, multiply it, put it back.

Arrays are `[B, T, N, H]`. A block of C positions is brought to `[B, K, Q, H]`,
with the C rows of the J = N/K query heads of a key head one after another, so
that Q = J·C and keys are never repeated. B and K stay two axes from the first
line to the last: arrays that are sharded along either are computed where they
are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import platform


def dot(
  spec: str, x: Array, y: Array, dtype: Any = jnp.float32
) -> Float[Array, "..."]:
  """An einsum of two blocks that accumulates in `dtype`."""
  return jnp.einsum(spec, x, y, preferred_element_type=dtype)


def inner(
  x: Float[Array, "*A D"], y: Float[Array, "*A D"]
) -> Float[Array, "*A 1"]:
  """Σ_d x[d] y[d] in float32, as a product; as a sum it is slow on a CPU."""
  return dot("...d,...d->...", x, y)[..., None]


def turned(x: Float[Array, "*A X Y"]) -> Float[Array, "*A Y X"]:
  """A block transposed, so that the product that reads it is a fast one."""
  return platform.apart(jnp.swapaxes(x, -2, -1))


def cut(x: Array, start: Array | int, size: int, axis: int = 1) -> Array:
  """`size` positions of `x` from `start`."""
  return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def put(x: Array, block: Array, start: Array | int, axis: int = 1) -> Array:
  """`x` with the positions from `start` replaced, in the dtype of `x`."""
  block = block.astype(x.dtype)
  return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis=axis)


def add(total: Array, block: Array, start: Array | int, axis: int = 1) -> Array:
  """`total` with `block` added to the positions from `start`."""
  block = block + cut(total, start, block.shape[axis], axis)
  return put(total, block, start, axis)


def written(
  past: Shaped[Array, "B S *F"],
  now: Shaped[Array, "B 1 *F"],
  here: Bool[Array, "B S"],
) -> Shaped[Array, "B S *F"]:
  """A cache with the position `here` of each example replaced.

  A selection, not a scatter: it fuses, and every example may be at another
  position.
  """
  here = here.reshape(*here.shape, *[1] * (past.ndim - 2))
  return jnp.where(here, now.astype(past.dtype), past)


def rows_at(
  x: Shaped[Array, "B T *F"], index: Int[Array, "B G"]
) -> Shaped[Array, "B G *F"]:
  """Rows of `x` at other positions in every example."""
  return jax.vmap(lambda rows, i: rows[i])(x, index)


def head_rows(
  x: Shaped[Array, "B T K *F"], index: Int[Array, "B N G C"]
) -> Shaped[Array, "B N G C *F"]:
  """Rows of head n, read from head n // (N/K) of x; zeros for index T."""

  def read(x, index):
    return x.at[index].get(mode="fill", fill_value=0)

  by_kv_head = index.reshape(len(x), x.shape[2], -1)
  rows = jax.vmap(jax.vmap(read, (1, 0)))(x, by_kv_head)
  return rows.reshape(*index.shape, *x.shape[3:])


def heads_first(
  x: Shaped[Array, "B C N *H"], kv_heads: int
) -> Shaped[Array, "B K Q *H"]:
  """Rows of the query heads that share a key head, one head after another."""
  batch, rows, num_heads = x.shape[:3]
  x = x.reshape(batch, rows, kv_heads, num_heads // kv_heads, *x.shape[3:])
  x = jnp.moveaxis(x, 1, 3)
  return x.reshape(batch, kv_heads, -1, *x.shape[4:])


def heads_last(
  x: Shaped[Array, "B K Q *H"], rows: int
) -> Shaped[Array, "B C N *H"]:
  """Undoes `heads_first` on a block of C = `rows` positions."""
  batch, kv_heads = x.shape[:2]
  x = x.reshape(batch, kv_heads, -1, rows, *x.shape[3:])
  x = jnp.moveaxis(x, 3, 1)
  return x.reshape(batch, rows, -1, *x.shape[4:])


def alike(tree: Any, like: Any = None) -> Any:
  """The arrays, varying over all mesh axes that any of them (or of `like`) does.

  Inside `jax.shard_map`, loops and custom derivatives want one type of all.
  """

  def varying(x):
    return jax.typeof(x).manual_axis_type.varying

  leaves = jax.tree.leaves(tree if like is None else like)
  axes = frozenset().union(*map(varying, leaves))

  def vary(x):
    lacking = tuple(axes - varying(x))
    return jax.lax.pcast(x, lacking, to="varying") if lacking else x

  return jax.tree.map(vary, tree)
