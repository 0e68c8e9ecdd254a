"""One block of scores of `flash_attention`: who sees whom, and what is added.

A block is C queries by D keys of every head, `[B, N, C, D]`. Masks and biases
are read along the axes that they have, so one of `[B, 1, 1, S]` never grows.
"""

from typing import NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import blocks
from attention import relative as relative_terms
from attention.relative import Relative


class Settings(NamedTuple):
  """What is known while tracing.

  Attributes:
    scale: factor of the logits.
    is_causal: query t sees keys s ≤ t.
    rows: C, at most T.
    width: D, at most S.
    dropout_rate: share of weights set to zero.
  """

  scale: float
  is_causal: bool
  rows: int
  width: int
  dropout_rate: float


class Operands(NamedTuple):
  """The arrays that have a derivative."""

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  bias: Float[Array, "..."] | None
  relative: Relative


class Limits(NamedTuple):
  """Who may see whom, and the key of the dropout."""

  mask: Bool[Array, "..."] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None
  dropout_rng: Array | None

  @property
  def hides(self) -> bool:
    """Whether a mask or segments, and not positions alone, hide a pair."""
    return self.mask is not None or self.query_segments is not None


class Queries(NamedTuple):
  """A block of queries: the number of its block, first position and rows."""

  number: Int[Array, ""]
  start: Int[Array, ""]
  query: Float[Array, "A Q H"]


class Keys(NamedTuple):
  """A block of keys; those before `fresh` belong to the block before it."""

  number: Int[Array, ""]
  start: Int[Array, ""]
  fresh: Int[Array, ""]


def by_head(settings: Settings, operands: Operands) -> tuple[int, ...]:
  """`[B, N, C, D]`, where masks and biases apply to a block of scores."""
  batch, _, num_heads, _ = operands.query.shape
  return batch, num_heads, settings.rows, settings.width


def _of_block(x: Array, settings: Settings, queries: Queries, keys: Keys):
  """The block of an array that broadcasts to `[B, N, T, S]`."""
  if x.shape[2] > 1:
    x = blocks.cut(x, queries.start, settings.rows, axis=2)
  if x.shape[3] > 1:
    x = blocks.cut(x, keys.start, settings.width, axis=3)
  return x


def allowed(
  settings: Settings, limits: Limits, queries: Queries, keys: Keys
) -> Bool[Array, "#B #N #C D"]:
  """Which pairs of the block count."""
  key_positions = keys.start + jnp.arange(settings.width)
  seen = (key_positions >= keys.fresh)[None, None, None, :]
  if settings.is_causal:
    positions = queries.start + jnp.arange(settings.rows)
    seen &= (key_positions[None, :] <= positions[:, None])[None, None]
  if limits.mask is not None:
    seen &= _of_block(limits.mask, settings, queries, keys)
  if limits.query_segments is not None and limits.key_segments is not None:
    ours = blocks.cut(limits.query_segments, queries.start, settings.rows)
    theirs = blocks.cut(limits.key_segments, keys.start, settings.width)
    seen &= (ours[:, :, None] == theirs[:, None, :])[:, None]
  return seen


def bias_of(
  settings: Settings, operands: Operands, queries: Queries, keys: Keys
) -> Float[Array, "#B #N #C #D"]:
  """What the bias, which there must be, adds to the block."""
  bias = _of_block(cast(Array, operands.bias), settings, queries, keys)
  return bias.astype(jnp.float32)


def relative_logits(
  settings: Settings,
  operands: Operands,
  queries: Queries,
  keys: Keys,
  *,
  by_key: bool,
) -> Float[Array, "A X Y"]:
  """What the tables, at least one, add to the products of the block."""
  return relative_terms.logits(
    operands.relative,
    queries.query,
    keys.start - queries.start,
    settings.rows,
    settings.width,
    settings.scale,
    by_key,
  )


def kept(
  settings: Settings,
  operands: Operands,
  limits: Limits,
  queries: Queries,
  keys: Keys,
) -> Float[Array, "B N C D"]:
  """Δ of the block: the same in the forward and in the backward."""
  return blocks.kept(
    limits.dropout_rng,
    settings.dropout_rate,
    by_head(settings, operands),
    queries.number,
    keys.number,
  )


def transposed(
  x: Shaped[Array, "#B #N #C #D"], kv_heads: int
) -> Shaped[Array, "#B #K #D #J #C"]:
  """Scores by head as the backward holds them; axes of size 1 stay so."""
  batch, num_heads, rows, width = x.shape
  groups = (kv_heads, num_heads // kv_heads) if num_heads > 1 else (1, 1)
  return jnp.moveaxis(x.reshape(batch, *groups, rows, width), 4, 2)
