"""Logits that depend on the distance s − t: one table, any block.

Two terms may be added to the logits of query t and key s, at the distance
i = clip(s − t, −L, L):

  relative_bias  b ∈ [N, 2L+1]    + b[n, L + i]                  (T5, ALiBi)
  relative_keys  a ∈ [2L+1, H]    + scale · q_t · a[L + i]       (Shaw et al.)
                 a ∈ [N, 2L+1, H] + scale · q_t · a[n, L + i]

Both are linear in memory: a tile of C queries and D keys meets C + D − 1
distances only. Its terms are first computed per distance, x[c, m] with
m = d − c + C − 1, and then put on the diagonals, y[c, d] = x[c, d − c + C − 1].
That needs no gather: rows of C + D numbers, laid end to end and cut into rows
of C + D − 1, stand one place further in each row.

Papers: Self-attention with relative position representations,
arXiv:1803.02155 (whose maximum distance k is L; its heads share one table; its
relative values, which it found unnecessary, are not here); Transformer-XL, whose
heads have a table each, arXiv:1901.02860; T5, arXiv:1910.10683; ALiBi,
arXiv:2108.12409.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import layout, platform


class Relative(NamedTuple):
  """The tables of a call; None where it has none.

  Attributes:
    bias: b.
    keys: a.
  """

  bias: Float[Array, "N E"] | None = None
  keys: Float[Array, "... E H"] | None = None

  @property
  def given(self) -> bool:
    """Whether there is any table."""
    return self.bias is not None or self.keys is not None


def check(
  relative_bias: Float[Array, "N D"] | None,
  relative_keys: Float[Array, "... E H"] | None,
  query: Float[Array, "B T N H"],
) -> Relative:
  """Checks both tables and returns them together.

  Raises:
    ValueError: a table does not have an odd number of distances, or does not
      fit the heads or features of `query`.
  """
  num_heads, head_dim = query.shape[2:]
  for name, table, fitting, expected in (
    (
      "relative_bias",
      relative_bias,
      [(num_heads, None)],
      f"[{num_heads}, 2L+1]",
    ),
    (
      "relative_keys",
      relative_keys,
      [(None, head_dim), (num_heads, None, head_dim)],
      f"[2L+1, {head_dim}] or [{num_heads}, 2L+1, {head_dim}]",
    ),
  ):
    if table is not None and not any(
      _fits(table.shape, shape) for shape in fitting
    ):
      raise ValueError(
        f"{name}: expected {expected}, one entry for each distance "
        f"-L … L of key from query, got shape {table.shape}"
      )
  return Relative(relative_bias, relative_keys)


def _fits(shape: tuple[int, ...], fitting: tuple[int | None, ...]) -> bool:
  """Whether a shape has these sizes, None being any that is odd."""
  return len(shape) == len(fitting) and all(
    size % 2 == 1 if wanted is None else size == wanted
    for size, wanted in zip(shape, fitting, strict=True)
  )


def logits(
  tables: Relative,
  query: Float[Array, "B K Q H"],
  offset: int | Int[Array, ""],
  rows: int,
  width: int,
  scale: float | Float[Array, ""],
) -> Float[Array, "#B K Q D"]:
  """What the tables add to the logits of a tile.

  Args:
    tables: at least one.
    query: Q = N/K · C rows, unscaled.
    offset: position of the first key less that of the first query.
    rows: C.
    width: D.
    scale: factor of `tables.keys`.

  Returns:
    `[B, K, Q, D]`, float32; B is 1 where only the bias
    is given. Cost: B·K·Q·(C+D)·H multiplications for keys, B·K·Q·(C+D) numbers.
  """
  batch, kv_heads, queries, _ = query.shape
  groups = queries // rows
  distances = offset + jnp.arange(-(rows - 1), width)
  total = None
  if tables.bias is not None:
    bias = at_distance(tables.bias, distances)
    bias = bias.astype(jnp.float32)
    total = _on_diagonals(bias, rows, width)
    total = total.reshape(1, kv_heads, queries, width)
  if tables.keys is not None:
    index = _index(tables.keys.shape[-2], distances)
    keys = jnp.take(tables.keys, index, axis=-2)
    by_head = (batch, kv_heads, groups, rows)
    if keys.ndim == 2:
      per_distance = layout.dot("bkqh,mh->bkqm", query, keys)
    else:
      keys = keys.reshape(kv_heads, groups, *keys.shape[1:])
      per_distance = layout.dot(
        "bkjch,kjmh->bkjcm", query.reshape(*by_head, -1), keys
      )
    per_distance = per_distance.reshape(*by_head, len(distances))
    more = scale * skew(per_distance)
    more = more.reshape(batch, kv_heads, queries, width)
    total = more if total is None else total + more
  assert total is not None
  return total


def at_position(
  tables: Relative,
  query: Float[Array, "B 1 N H"],
  distance: Int[Array, "B #N S"],
  scale: float | Float[Array, ""],
) -> Float[Array, "B N 1 S"]:
  """What the tables add for one query an example, at any distances."""
  batch, _, num_heads, _ = query.shape
  shape = (batch, num_heads, distance.shape[-1])
  total = jnp.zeros(shape, jnp.float32)
  if tables.bias is not None:
    heads = jnp.arange(num_heads)[None, :, None]
    index = _index(tables.bias.shape[1], distance)
    index, heads = jnp.broadcast_arrays(index, jnp.broadcast_to(heads, shape))
    total += tables.bias[heads, index].astype(jnp.float32)
  if tables.keys is not None:
    index = _index(tables.keys.shape[-2], distance)
    if tables.keys.ndim == 2:
      keys = tables.keys[index]
    else:
      heads = jnp.arange(num_heads)[None, :, None]
      keys = tables.keys[heads, jnp.broadcast_to(index, shape)]
    keys = jnp.broadcast_to(keys, (*shape, keys.shape[-1]))
    total += scale * jnp.einsum(
      "BTNH,BNSH->BNS", query, keys, preferred_element_type=jnp.float32
    )
  return total[:, :, None]


def at_distance(
  table: Float[Array, "*A D"], distance: Int[Array, "E"]
) -> Float[Array, "*A E"]:
  """The entries of a table of D = 2L+1 at distances, clipped to ±L."""
  return table[..., _index(table.shape[-1], distance)]


def _index(size: int, distance: Int[Array, "..."]) -> Int[Array, "..."]:
  """Where a table of `size` = 2L+1 entries has clip(distance, −L, L)."""
  longest = size // 2
  return jnp.clip(distance, -longest, longest) + longest


def skew(x: Float[Array, "*A C E"]) -> Float[Array, "*A C D"]:
  """y[c, d] = x[c, d − c + C − 1], E = C + D − 1.

  Rows of E + 1 numbers, laid end to end and cut into rows of E, stand one place
  further in each row. So no gather is needed.
  """
  *leading, rows, distances = x.shape
  width = distances - rows + 1
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
  x = x.reshape(*leading, rows * (distances + 1))
  x = jax.lax.slice_in_dim(x, rows - 1, rows - 1 + rows * distances, axis=-1)
  return x.reshape(*leading, rows, distances)[..., :width]


def _on_diagonals(
  x: Float[Array, "N E"], rows: int, width: int
) -> Float[Array, "N C D"]:
  """y[c, d] = x[d − c + C − 1], E = C + D − 1: row c is a slice of x."""
  if not platform.profile().copies_rows:
    return skew(jnp.broadcast_to(x[:, None, :], (len(x), rows, x.shape[1])))

  def put(c, y):
    row = layout.cut(x, rows - 1 - c, width)
    return layout.put(y, row[:, None], c)

  y = jnp.zeros((len(x), rows, width), x.dtype)
  return jax.lax.fori_loop(0, rows, put, y)
