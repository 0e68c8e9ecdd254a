"""Blocks of positions for linear attention: their size, keys and cotangents.

Block i holds the positions [a, a+R) with a = min(i·R, L−R). The last block
moves back to end at L, so that no array is padded. Keys that it shares with the
block before do not count again, and the gradient of such queries is 0 because
their n is set to ∞.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.core.layout import (
  add,
  cut,
  heads_first,
  heads_last,
  inner,
  put,
)

BLOCK = 256
"""Positions of a block: smaller products run slower (benchmarks/README.md). A
step of the loops is one block on a CPU, and elsewhere as many as the platform's
budget of bytes allows."""


class Steps(NamedTuple):
  """How a sequence is cut into blocks; hashable.

  Attributes:
    length: L.
    size: R, at most L.
    count: how many blocks there are.
  """

  length: int
  size: int
  count: int

  @property
  def is_whole(self) -> bool:
    """Whether no two blocks share a position."""
    return self.count * self.size == self.length

  def start(self, i: Int[Array, ""]) -> Int[Array, ""]:
    """The first position of block i."""
    return jnp.minimum(i * self.size, self.length - self.size)

  def is_new(self, i: Int[Array, ""]) -> Bool[Array, "R"]:
    """Which positions of block i are in no earlier block."""
    return self.start(i) + jnp.arange(self.size) >= i * self.size


class KeyBlock(NamedTuple):
  """One block of keys in the form that products take; `keep` None is all."""

  start: Int[Array, ""]
  key: Float[Array, "B K C H"]
  value: Float[Array, "B K C V"]
  keep: Bool[Array, "#B 1 C 1"] | None


def block_bytes(
  x: Float[Array, "B L N H"], size: int, num_features: int
) -> int:
  """Bytes of `size` positions of `x` and of their features in float32."""
  batch, _, num_heads, width = x.shape
  return 4 * batch * size * num_heads * (num_features + 2 * width)


def rows_of(
  x: Float[Array, "B L N D"], i: Int[Array, ""], steps: Steps, kv_heads: int
) -> Float[Array, "B K Q D"]:
  """Block i as rows of the key heads, in float32."""
  block = cut(x, steps.start(i), steps.size)
  return heads_first(block, kv_heads).astype(jnp.float32)


def cut_keys(
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
  i: Int[Array, ""],
  steps: Steps,
) -> KeyBlock:
  """Block i of the keys; those of the block before do not count."""
  kv_heads = key.shape[2]
  key, value = (rows_of(x, i, steps, kv_heads) for x in (key, value))
  kept = None if steps.is_whole else steps.is_new(i)[None]
  if keep is not None:
    masked = cut(keep, steps.start(i), steps.size)
    kept = masked if kept is None else masked & kept
  if kept is not None:
    kept = kept[:, None, :, None]
    # Also set to zero, so that a nan in them does not get through a product.
    key, value = (jnp.where(kept, x, 0.0) for x in (key, value))
  return KeyBlock(steps.start(i), key, value, kept)


def cut_cotangent(
  cotangent: Float[Array, "B T N V"],
  out: Float[Array, "B T N V"],
  norm: Float[Array, "B T N 1"],
  i: Int[Array, ""],
  steps: Steps,
  kv_heads: int,
) -> tuple[Float[Array, "B K Q X"], Float[Array, "B K Q 1"]]:
  """(g, δ) of block i of the queries, and their n; ∞ for those not new."""
  g, rows = (rows_of(x, i, steps, kv_heads) for x in (cotangent, out))
  n = cut(norm, steps.start(i), steps.size)
  if not steps.is_whole:
    n = jnp.where(steps.is_new(i)[None, :, None, None], n, jnp.inf)
  g = jnp.concatenate([g, -inner(g, rows)], axis=-1)
  return g, heads_first(n, kv_heads)


def cut_sums(
  cotangent: Float[Array, "B T N X"],
  i: Int[Array, ""],
  steps: Steps,
  kv_heads: int,
) -> Float[Array, "B K Q X"]:
  """The cotangent of the sums of block i of the queries; 0 for those not new."""
  block = cut(cotangent, steps.start(i), steps.size)
  if not steps.is_whole:
    block = jnp.where(steps.is_new(i)[None, :, None, None], block, 0.0)
  return heads_first(block, kv_heads)


def put_query_rows(
  d_query: Float[Array, "B T N H"],
  rows: Float[Array, "B K Q H"],
  i: Int[Array, ""],
  steps: Steps,
) -> Float[Array, "B T N H"]:
  """`d_query` with the gradient of block i put in."""
  place = put if steps.is_whole else add
  return place(d_query, heads_last(rows, steps.size), steps.start(i))


def put_key_rows(
  d_key: Float[Array, "B S K D"],
  rows: Float[Array, "B K C D"],
  block: KeyBlock,
) -> Float[Array, "B S K D"]:
  """`d_key`, of keys or values, with the gradient of a block put in.

  Keys that do not count get 0, so that no nan reaches them, and keys that the
  block before shares are not changed.
  """
  size = rows.shape[2]
  if block.keep is None:
    return put(d_key, heads_last(rows, size), block.start)
  rows = jnp.where(block.keep, rows, 0.0)
  return add(d_key, heads_last(rows, size), block.start)
