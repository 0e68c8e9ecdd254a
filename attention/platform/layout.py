"""Blocks of arrays: slicing, products, and updates.

Arrays are `[B, T, N, H]`, and a block of C positions is `[B, N, C, H]`. N = J·K query
heads share K key heads, which are never repeated: a product combines the C rows of J
query heads. B and the heads are always separate axes, so that arrays that are sharded
along one of them need no communication.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
"""An einsum that accumulates in float32."""

cut = partial(jax.lax.dynamic_slice_in_dim, axis=1)
"""`cut(x, start, size)`: `size` positions of x from `start`."""


def zero_masked(
  x: Shaped[Array, "B S *F"], keep: Bool[Array, "B S"] | None
) -> Shaped[Array, "B S *F"]:
  """Zeros masked positions of `x`, so that a NaN there does not spread."""
  if keep is None:
    return x
  return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0)


def query_dot(
  spec: str,
  x: Float[Array, "B N C X"],
  y: Float[Array, "B K D Y"],
  dtype: Any = jnp.float32,
) -> Float[Array, "B N C Z"]:
  """The product of the rows of every query head with its key head.

  `spec` is 'bkqh,bkdh->bkqd' or 'bkqd,bkdv->bkqv', with Q = J·C rows per key head.
  """
  grouped = x.reshape(x.shape[0], y.shape[1], -1, x.shape[3])
  product = jnp.einsum(spec, grouped, y, preferred_element_type=dtype)
  return product.reshape(*x.shape[:3], -1)


def key_dot(
  x: Float[Array, "B N C D"], y: Float[Array, "B N C H"], kv_heads: int
) -> Float[Array, "B K D H"]:
  """Σ x_c ⊗ y_c over C rows of the query heads of each key head, in float32."""
  x, y = (z.reshape(z.shape[0], kv_heads, -1, z.shape[3]) for z in (x, y))
  # XLA:CPU uses its fast kernel for this order.
  product = dot("bkhq,bkqd->bkhd", jnp.swapaxes(y, 2, 3), x)
  return jnp.swapaxes(product, 2, 3)


def put(x: Array, block: Array, start: Array | int) -> Array:
  """Replaces the positions of `x` from `start` on with `block`, in the dtype of `x`."""
  block = block.astype(x.dtype)
  return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis=1)


def add(total: Array, block: Array, start: Array | int) -> Array:
  """Adds `block` to the positions of `total` from `start` on."""
  return put(total, block + cut(total, start, block.shape[1]), start)


def add_tiles(
  total: Float[Array, "B S K H"],
  tiles: Float[Array, "n B K D H"],
  start: Array | int,
  rows: int,
) -> Float[Array, "B S K H"]:
  """Adds n tiles to `total`, tile i to the D positions from `start + i · rows` on.

  A tile that would extend beyond an end of `total` has the D positions at that end; its
  rows outside its own range are ignored. The sum uses shifts instead of a scatter,
  because tiles overlap, and a scatter adds to a position in any order.
  """
  source_length, width = total.shape[1], tiles.shape[3]
  starts = start + rows * jnp.arange(tiles.shape[0])
  tiles = _shift(tiles, jnp.clip(starts, 0, source_length - width) - starts)
  # In blocks of `rows` positions, block o of tile i is added to block i + o.
  blocks = -(-width // rows)
  padding = [(0, 0)] * 3 + [(0, blocks * rows - width), (0, 0)]
  tiles = jnp.pad(tiles, padding)
  shifted = [
    jnp.pad(x, [(o, blocks - 1 - o)] + [(0, 0)] * 4)
    for o, x in enumerate(jnp.split(tiles, blocks, axis=3))
  ]
  sums = reduce(jnp.add, shifted)
  sums = sums.transpose(1, 0, 3, 2, 4)
  sums = sums.reshape(total.shape[0], -1, *total.shape[2:])
  size = min(sums.shape[1], source_length)
  clipped = jnp.clip(start, 0, source_length - size)
  sums = _take(sums, clipped - start + jnp.arange(size), 1)
  return add(total, sums, clipped)


def add_blocks(
  total: Float[Array, "B S K H"],
  tiles: Float[Array, "n B K D H"],
  blocks: Int[Array, "n"],
) -> Float[Array, "B S K H"]:
  """Adds n tiles to `total`, tile i to the block `blocks[i]` of D positions.

  Blocks may repeat, and invalid block numbers are ignored. A tile of the last block has
  the last D positions. The sum is a product with one-hot vectors in the dtype of the
  tiles, accumulated in float32, because accelerators serialise scatter updates to the
  same position.
  """
  source_length, width = total.shape[1], tiles.shape[3]
  count = -(-source_length // width)
  if missing := count * width - source_length:
    tiles = _shift(tiles, jnp.where(blocks == count - 1, -missing, 0))
  one_hot = jax.nn.one_hot(blocks, count, dtype=tiles.dtype)
  # Factors of 16 bits are exact at any precision.
  precision = "default" if one_hot.dtype.itemsize < 4 else "highest"
  sums = dot("nc,nbkdh->bcdkh", one_hot, tiles, precision=precision)
  sums = sums.reshape(total.shape[0], -1, *total.shape[2:])
  return total + sums[:, :source_length]


def tiles(
  x: Shaped[Array, "B S *F"], rows: int, width: int
) -> Shaped[Array, "B n D *F"]:
  """The n tiles of D = `width` positions that start at 0, `rows`, 2·`rows`, …

  S is (n − 1)·`rows` + D. Tiles are concatenations of blocks, so that gradients are
  sums of shifted blocks, as in `add_tiles`.
  """
  count, blocks = (x.shape[1] - width) // rows + 1, -(-width // rows)
  missing = (count - 1 + blocks) * rows - x.shape[1]
  x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], -1, rows, *x.shape[2:])
  shifted = [x[:, o : o + count] for o in range(blocks)]
  return jnp.concatenate(shifted, axis=2)[:, :, :width]


def _take(x: Array, index: Int[Array, "n"], axis: int) -> Array:
  """Takes entries along an axis; zeros for indices out of range."""
  index = jnp.where(index < 0, x.shape[axis], index)
  return jnp.take(x, index, axis=axis, mode="fill", fill_value=0)


def _shift(
  tiles: Float[Array, "n B K D H"], by: Int[Array, "n"]
) -> Float[Array, "n B K D H"]:
  """Shifts the rows of tiles by `by` positions, and fills with zeros."""
  width = tiles.shape[3]
  return jax.vmap(lambda x, by: _take(x, jnp.arange(width) - by, 2))(tiles, by)


def write(
  cache: Shaped[Array, "B S *F"],
  row: Shaped[Array, "B 1 *F"],
  here: Bool[Array, "B S"],
) -> Shaped[Array, "B S *F"]:
  """Writes a row to the cache of each example, at the position where `here` is True.

  It uses a select instead of a scatter, because a select fuses with other operations.
  """
  here = here.reshape(*here.shape, *[1] * (cache.ndim - 2))
  return jnp.where(here, row.astype(cache.dtype), cache)


def rows_at(
  x: Shaped[Array, "B T *F"], index: Int[Array, "B G"]
) -> Shaped[Array, "B G *F"]:
  """Gathers rows of `x` at the positions `index` of each example."""
  return jax.vmap(lambda rows, i: rows[i])(x, index)


def head_rows(
  x: Shaped[Array, "B T K *F"], index: Int[Array, "B N G C"]
) -> Shaped[Array, "B N G C *F"]:
  """Gathers rows for head n from head n // (N/K) of x; zeros for index T.

  A row may be gathered several times, and in half precision the sum of its gradients
  would be rounded after each term. So rows are gathered in float32.
  """
  dtype = x.dtype
  if jnp.issubdtype(dtype, jnp.floating):
    x = x.astype(jnp.promote_types(dtype, jnp.float32))

  def gather(x, index):
    return x.at[index].get(mode="fill", fill_value=0)

  flat_index = index.reshape(x.shape[0], x.shape[2], -1)
  rows = jax.vmap(jax.vmap(gather, (1, 0)))(x, flat_index)
  return rows.reshape(*index.shape, *x.shape[3:]).astype(dtype)


def zeros_after(
  dependency: Shaped[Array, "..."],
  like: Shaped[Array, "..."],
  dtype: Any = None,
  shape: tuple[Any, ...] | None = None,
) -> Float[Array, "..."]:
  """`jnp.zeros_like(like, dtype, shape=shape)`, allocated only after `dependency`.

  Otherwise, XLA:GPU would create the zeros for all layers of a model in one kernel at
  the start of the step, and keep them until the last layer.
  """
  zero = jnp.zeros((), like.dtype if dtype is None else dtype)
  zero, _ = jax.lax.optimization_barrier((zero, dependency))
  return jnp.zeros_like(like, dtype, shape=shape) + zero
