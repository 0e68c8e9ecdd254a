"""One block of pairs of `additive_attention`: who counts, and what is kept.

A block is C queries by D keys. Masks and biases are read, and the gradient of a
bias written, along the axes that they have, so that one of `[B, 1, 1, S]` never
grows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import blocks


class Settings(NamedTuple):
  """What is known while tracing.

  Attributes:
    is_causal: query t sees keys s ≤ t.
    dropout_rate: share of weights set to zero.
  """

  is_causal: bool
  dropout_rate: float


class Limits(NamedTuple):
  """Who may see whom beside causality, and the key of the dropout.

  `mask` has each axis full or 1.
  """

  mask: Bool[Array, "..."] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None
  dropout_rng: Array | None


class Blocks(NamedTuple):
  """How the lengths are cut: sizes of a block and number of blocks."""

  rows: int
  columns: int
  num_rows: int
  num_columns: int


def _corner(x: Array, row: Array | int, column: Array | int) -> list:
  """Where the pairs from (row, column) on start in `x [B|1, N|1, T|1, S|1]`."""
  return [0, 0, row if x.shape[2] > 1 else 0, column if x.shape[3] > 1 else 0]


def part(x: Array, row: Array | int, column: Array | int, blocks: Blocks):
  """The block of `x [B|1, N|1, T|1, S|1]` at (row, column)."""
  size = (
    *x.shape[:2],
    min(x.shape[2], blocks.rows),
    min(x.shape[3], blocks.columns),
  )
  return jax.lax.dynamic_slice(x, _corner(x, row, column), size)


def allowed(
  is_causal: bool,
  limits: Limits,
  blocks: Blocks,
  row: Array | int,
  column: Array | int,
  first: Array | int,
) -> Bool[Array, "..."]:
  """Which pairs of a block count; keys before `first` had their turn."""
  t = row + jnp.arange(blocks.rows)[:, None]
  s = column + jnp.arange(blocks.columns)[None, :]
  seen = s >= first
  if is_causal:
    seen = seen & (s <= t)
  seen = seen[None, None]
  if limits.mask is not None:
    seen = seen & part(limits.mask, row, column, blocks)
  if limits.query_segments is not None and limits.key_segments is not None:
    of_rows = jax.lax.dynamic_slice_in_dim(
      limits.query_segments, row, blocks.rows, 1
    )
    of_keys = jax.lax.dynamic_slice_in_dim(
      limits.key_segments, column, blocks.columns, 1
    )
    same = of_rows[:, :, None] == of_keys[:, None, :]
    seen = seen & same[:, None]
  return seen


def kept(
  settings: Settings,
  limits: Limits,
  i: Array,
  j: Array,
  shape: tuple[int, ...],
) -> Float[Array, "B N C D"]:
  """Δ of block (i, j): the same in the forward and in the backward."""
  return blocks.kept(limits.dropout_rng, settings.dropout_rate, shape, i, j)


def add_to(
  total: Array | None,
  block: Float[Array, "B N C D"],
  row: Array | int,
  column: Array | int,
  blocks: Blocks,
) -> Array | None:
  """Adds a block of pairs to the gradient of a bias, summed where it is 1."""
  if total is None:
    return None
  axes = tuple(i for i in range(4) if total.shape[i] == 1)
  block = jnp.sum(block, axes, keepdims=True)
  block = block + part(total, row, column, blocks)
  return jax.lax.dynamic_update_slice(total, block, _corner(total, row, column))
