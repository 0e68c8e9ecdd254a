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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import blocks


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
  by_key: bool = False,
) -> Float[Array, "A X Y"]:
  """What the tables add to the logits of a block.

  Args:
    relative: at least one table.
    query: A = B·K products of Q = N/K · C rows, unscaled.
    offset: position of the first key less that of the first query.
    rows: C.
    width: W.
    scale: factor of `relative.keys`.
    by_key: transposed, as backwards hold scores.

  Returns:
    `[A, Q, W]`, by key `[A, W, Q]`, float32. Cost: A·Q·(C+W)·H multiplications
    for keys, A·Q·(C+W) numbers.
  """
  products, queries, _ = query.shape
  groups = queries // rows
  distances = offset + jnp.arange(-(rows - 1), width)
  total = None
  if relative.bias is not None:
    table = relative.bias[:, _index(relative.bias.shape[1], distances)]
    table = table.astype(jnp.float32)
    # N = K·J, and A = B·K: the heads of an example are J rows of K products.
    if by_key:
      total = _on_diagonals(table[:, ::-1], width, rows)
      total = total.reshape(-1, groups, width, rows)
      total = jnp.swapaxes(total, 1, 2).reshape(-1, width, queries)
    else:
      total = _on_diagonals(table, rows, width).reshape(-1, queries, width)
    shape = (products // total.shape[0], *total.shape)
    total = jnp.broadcast_to(total[None], shape)
    total = total.reshape(products, *shape[2:])
  if relative.keys is not None:
    keys = relative.keys[_index(relative.keys.shape[0], distances)]
    per_distance = jnp.einsum(
      "AQH,MH->AQM", query, keys, preferred_element_type=jnp.float32
    )
    more = scale * _skew(
      per_distance.reshape(products, groups, rows, len(distances))
    )
    more = more.reshape(products, queries, width)
    more = jnp.swapaxes(more, 1, 2) if by_key else more
    total = more if total is None else total + more
  assert total is not None
  return total


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
  """The gradient of a table whose logits have those of `scores`."""
  products, width, queries = scores.shape
  by_head = scores.reshape(products, width, queries // rows, rows)
  by_head = jnp.swapaxes(by_head, 1, 2).reshape(-1, width, rows)
  sums = _diagonal_sums(by_head)[:, ::-1]
  sums = jnp.sum(sums.reshape(-1, len(bias), sums.shape[-1]), axis=0)
  distances = offset + jnp.arange(-(rows - 1), width)
  index = _index(bias.shape[1], distances)
  return jnp.zeros_like(bias).at[:, index].add(sums.astype(bias.dtype))


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


def _on_diagonals(
  x: Float[Array, "N D"], rows: int, width: int
) -> Float[Array, "N C W"]:
  """y[c, w] = x[w − c + C − 1], D = C + W − 1: row c is a slice of x.

  Slices are copied one by one on a CPU, where the index arithmetic of `_skew`
  takes several times as long.
  """
  return jax.lax.platform_dependent(
    x,
    cpu=partial(_slices, rows=rows, width=width),
    default=partial(_skewed, rows=rows),
  )


def _slices(
  x: Float[Array, "N D"], rows: int, width: int
) -> Float[Array, "N C W"]:
  def put(c, y):
    return blocks.put(y, blocks.cut(x, rows - 1 - c, width)[:, None], c)

  y = jnp.zeros((len(x), rows, width), x.dtype)
  return jax.lax.fori_loop(0, rows, put, y)


def _skewed(x: Float[Array, "N D"], rows: int) -> Float[Array, "N C W"]:
  return _skew(jnp.broadcast_to(x[:, None, :], (len(x), rows, x.shape[1])))


def _diagonal_sums(y: Float[Array, "A C W"]) -> Float[Array, "A D"]:
  """x[m] = Σ_c y[c, m + c − C + 1], zero outside: undoes `_on_diagonals`.

  Row by row it takes a CPU as long as a sum over rows, at once nine times that.
  """
  return jax.lax.platform_dependent(y, cpu=_sums_by_row, default=_sums_at_once)


def _sums_by_row(y: Float[Array, "A C W"]) -> Float[Array, "A D"]:
  products, rows, width = y.shape

  def add(c, x):
    row = jax.lax.dynamic_index_in_dim(y, c, axis=1, keepdims=False)
    return blocks.add(x, row, rows - 1 - c)

  x = jnp.zeros((products, rows + width - 1), y.dtype)
  return jax.lax.fori_loop(0, rows, add, x)


def _sums_at_once(y: Float[Array, "A C W"]) -> Float[Array, "A D"]:
  """Rows of C − 1 zeros, W numbers and a zero, cut into rows one longer."""
  products, rows, width = y.shape
  y = jnp.pad(y, [(0, 0), (0, 0), (rows - 1, 1)]).reshape(products, -1)
  y = jnp.pad(y, [(0, 0), (0, rows)])
  y = y.reshape(products, rows, rows + width + 1)
  return jnp.sum(y, axis=1)[:, : rows + width - 1]
