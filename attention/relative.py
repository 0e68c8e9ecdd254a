"""Logits that depend on the distance s − t: one table, any block.

Two terms may be added to the logits of query t and key s, at the distance
i = clip(s − t, −L, L):

  relative_bias  b ∈ [N, 2L+1]    + b[n, L + i]                  (T5, ALiBi)
  relative_keys  a ∈ [2L+1, H]    + scale · q_t · a[L + i]       (Shaw et al.)

Both are linear in memory: a block of C queries and W keys meets C + W − 1
distances only. Its terms are first computed per distance, x[c, m] with
m = w − c + C − 1, and then put on the diagonals, y[c, w] = x[c, w − c + C − 1].
That needs no gather: rows of C + W numbers, laid end to end and cut into rows
of C + W − 1, stand one place further in each row.

Papers: Self-attention with relative position representations,
arXiv:1803.02155 (whose maximum distance k is L; its heads share one table, as
here; its relative values, which it found unnecessary, are not here); T5, arXiv:1910.10683; ALiBi, arXiv:2108.12409.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import blocks

_FOLDED = 16
"""Queries that remain of a block when `_bias_gradient` folds them."""


class Relative(NamedTuple):
  """The tables of a call; None where it has none."""

  bias: Float[Array, "N D"] | None = None
  keys: Float[Array, "E H"] | None = None

  @property
  def given(self) -> bool:
    """Whether there is any."""
    return self.bias is not None or self.keys is not None


def check(
  relative_bias: Float[Array, "N D"] | None,
  relative_keys: Float[Array, "E H"] | None,
  query: Float[Array, "B T N H"],
) -> Relative:
  """Checks both tables and returns them together.

  Raises:
    ValueError: a table does not have an odd number of distances, or does not
      fit the heads or features of `query`.
  """
  num_heads, head_dim = query.shape[2:]
  for name, table, axis, expected in (
    ("relative_bias", relative_bias, 1, f"[{num_heads}, 2L+1]"),
    ("relative_keys", relative_keys, 0, f"[2L+1, {head_dim}]"),
  ):
    if table is None:
      continue
    fits = (
      table.ndim == 2
      and table.shape[1 - axis] == (num_heads, head_dim)[1 - axis]
    )
    if not fits or table.shape[axis] % 2 == 0:
      raise ValueError(
        f"{name}: expected {expected}, one entry for each distance "
        f"-L … L of key from query, got shape {table.shape}"
      )
  return Relative(relative_bias, relative_keys)


def logits(
  relative: Relative,
  query: Float[Array, "A Q H"],
  offset: int | Int[Array, ""],
  rows: int,
  width: int,
  scale: float | Float[Array, ""],
) -> Float[Array, "A Q W"]:
  """What the tables add to the logits of a block.

  Args:
    relative: at least one table.
    query: A = B·K products of Q = N/K · C rows, unscaled.
    offset: position of the first key less that of the first query.
    rows: C.
    width: W.
    scale: factor of `relative.keys`.

  Returns:
    `[A, Q, W]` float32. Cost: A·Q·(C+W)·H multiplications for keys, A·Q·(C+W)
    numbers.
  """
  products, queries, _ = query.shape
  distances = offset + jnp.arange(-(rows - 1), width)
  total = jnp.zeros((products, queries // rows, rows, width), jnp.float32)
  if relative.bias is not None:
    table = relative.bias[:, _index(relative.bias.shape[1], distances)]
    table = table.astype(jnp.float32)
    table = jnp.broadcast_to(
      table[:, None, :], (table.shape[0], rows, len(distances))
    )
    on_diagonals = _skew(table)
    # N = K·J, and A = B·K: the heads of an example are J rows of K products.
    total += jnp.broadcast_to(
      on_diagonals[None], (total.size // on_diagonals.size, *on_diagonals.shape)
    ).reshape(total.shape)
  if relative.keys is not None:
    keys = relative.keys[_index(relative.keys.shape[0], distances)]
    per_distance = jnp.einsum(
      "AQH,MH->AQM", query, keys, preferred_element_type=jnp.float32
    )
    total += scale * _skew(
      per_distance.reshape(products, queries // rows, rows, len(distances))
    )
  return total.reshape(products, queries, width)


def gradients(
  relative: Relative,
  query: Float[Array, "A Q H"],
  scores: Float[Array, "A W Q"],
  offset: int | Int[Array, ""],
  rows: int,
  scale: float | Float[Array, ""],
) -> tuple[Relative, Float[Array, "A Q H"] | None]:
  """Gradients of the tables and of the queries through `logits`.

  Args:
    relative: the tables.
    query: as in `logits`.
    scores: gradients of the logits, transposed.
    offset: as in `logits`, with `rows` and `scale`.
    rows: C.
    scale: factor of `relative.keys`.

  Returns:
    Like `relative`, and like `query`, None where that has none.
  """
  bias, keys = relative
  if bias is not None:
    bias = _bias_gradient(bias, scores, offset, rows)
  if keys is None:
    return Relative(bias), None

  def of_keys(keys, query):
    width = scores.shape[1]
    return logits(Relative(None, keys), query, offset, rows, width, scale)

  _, pullback = jax.vjp(of_keys, keys, query)
  keys, d_query = pullback(jnp.swapaxes(scores, 1, 2))
  return Relative(bias, keys), d_query


def _bias_gradient(
  bias: Float[Array, "N D"],
  scores: Float[Array, "A W Q"],
  offset: int | Int[Array, ""],
  rows: int,
) -> Float[Array, "N D"]:
  """The gradient of a table whose logits have those of `scores`.

  Queries are first folded: those c and c + 16 of a block meet the same entries
  at keys 16 apart, so their gradients are added there. To take the diagonals of
  the whole block instead makes a backward half as long again.
  """
  products, width, queries = scores.shape
  if rows % _FOLDED == 0:
    apart = rows - _FOLDED
    tiles = scores.reshape(products, width, -1, rows // _FOLDED, _FOLDED)

    def fold(i, total):
      tile = jax.lax.dynamic_index_in_dim(tiles, i, axis=3, keepdims=False)
      tile = tile.reshape(products, width, -1)
      return blocks.add(total, tile, apart - i * _FOLDED)

    queries = queries // rows * _FOLDED
    folded = jnp.zeros((products, width + apart, queries))
    scores = jax.lax.fori_loop(0, rows // _FOLDED, fold, folded)
    rows, width, offset = _FOLDED, width + apart, offset - apart
  # Logits of a bias do not read the queries.
  query = jnp.zeros((products, queries, 1))

  def of_table(bias):
    return logits(Relative(bias), query, offset, rows, width, 1.0)

  return jax.vjp(of_table, bias)[1](jnp.swapaxes(scores, 1, 2))[0]


def at_position(
  relative: Relative,
  query: Float[Array, "B 1 N H"],
  distance: Int[Array, "B #N S"],
  scale: float | Float[Array, ""],
) -> Float[Array, "B N 1 S"]:
  """What the tables add for one query an example, at any distances."""
  batch, _, num_heads, _ = query.shape
  shape = (batch, num_heads, distance.shape[-1])
  total = jnp.zeros(shape, jnp.float32)
  if relative.bias is not None:
    heads = jnp.arange(num_heads)[None, :, None]
    index = _index(relative.bias.shape[1], distance)
    index, heads = jnp.broadcast_arrays(index, jnp.broadcast_to(heads, shape))
    total += relative.bias[heads, index].astype(jnp.float32)
  if relative.keys is not None:
    keys = relative.keys[_index(relative.keys.shape[0], distance)]
    keys = jnp.broadcast_to(keys, (*shape, keys.shape[-1]))
    total += scale * jnp.einsum(
      "BTNH,BNSH->BNS", query, keys, preferred_element_type=jnp.float32
    )
  return total[:, :, None]


def _index(size: int, distance: Int[Array, "..."]) -> Int[Array, "..."]:
  """Where a table of `size` = 2L+1 entries has clip(distance, −L, L)."""
  longest = size // 2
  return jnp.clip(distance, -longest, longest) + longest


def _skew(x: Float[Array, "*A C D"]) -> Float[Array, "*A C W"]:
  """y[c, w] = x[c, w − c + C − 1], D = C + W − 1."""
  *leading, rows, distances = x.shape
  width = distances - rows + 1
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
  x = x.reshape(*leading, rows * (distances + 1))
  x = jax.lax.slice_in_dim(x, rows - 1, rows - 1 + rows * distances, axis=-1)
  return x.reshape(*leading, rows, distances)[..., :width]
