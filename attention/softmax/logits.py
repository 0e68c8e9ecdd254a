"""The scores of queries and keys: `Logits`.

    x = scale · q kᵀ  →  soft cap  →  distance tables  →  score_mod  →  gates, bias

For the distance i = clip(s − t, −L, L) from query t to key s, the tables add

  relative_bias  b ∈ [N, 2L+1]    + b[n, L + i]                  (T5, ALiBi)
  relative_keys  a ∈ [2L+1, H]    + scale · q_t · a[L + i]       (Shaw et al.)
                 a ∈ [N, 2L+1, H] + scale · q_t · a[n, L + i]    (Transformer-XL)
  relative_queries  c of either shape  + scale · k_s · c[n, L + i]    (DeBERTa)

and forget gates add F_t − F_s, with F_t = Σ log f_u over u ≤ t. The memory of all terms
is linear in the length: a tile of C queries and D keys has only C + D − 1 distances.
All steps after the product are one plain function, which `jax.vjp` differentiates.

Papers: Self-attention with relative position representations, arXiv:1803.02155;
Transformer-XL, arXiv:1901.02860; T5, arXiv:1910.10683; ALiBi, arXiv:2108.12409;
DeBERTa, equations 2 to 4, arXiv:2006.03654; Forgetting transformer (gates),
arXiv:2503.02130; Gemma 2 (soft caps), arXiv:2408.00118; gpt-oss, arXiv:2508.10925.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import checks
from attention.platform.layout import cut, dot, key_dot, query_dot
from attention.platform.programs import type_name
from attention.softmax import mods as mods_lib
from attention.softmax.forget_gates import forget_sums
from attention.softmax.mods import MaskMod, Mod, ScoreMod
from attention.softmax.visible import Visible, VisibleOptions

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logits:
  """The terms and factors that turn the product of query and key into a score.

  A pytree in which `soft_cap` and `score_mod` are static.

  Attributes:
    scale: factor of the product; None means 1/√H.
    soft_cap: c in c · tanh(x / c).
    relative_bias: `[N, 2L+1]`, a bias for each clipped distance.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, a key for each clipped distance.
    relative_queries: of the same shapes, a query for each clipped distance.
    score_mod: (score, b, n, t, s) -> score.
    bias: added to the scores; broadcastable to `[B, N, T, S]`.
    log_forget: `[B, T, N]`, logarithms of forget gates, for causal calls with T = S.
    sinks: `[N]`, one more logit per head, which takes weight but has no value; or
      `[B, T, N]`, one per query and head.
  """

  scale: Any = None
  soft_cap: float | None = dataclasses.field(default=None, metadata=_STATIC)
  relative_bias: Any = None
  relative_keys: Any = None
  relative_queries: Any = None
  score_mod: ScoreMod | None = dataclasses.field(default=None, metadata=_STATIC)
  bias: Any = None
  log_forget: Any = None
  sinks: Any = None

  def select_heads(self, heads: Any) -> "Logits":
    """Returns the `Logits` of some of the heads."""
    bias = self.relative_bias

    def select(table):
      return table if table is None or table.ndim == 2 else table[heads]

    return dataclasses.replace(
      self,
      relative_bias=bias if bias is None else bias[heads],
      relative_keys=select(self.relative_keys),
      relative_queries=select(self.relative_queries),
    )

  def scores(
    self,
    query: Float[Array, "B T N H"],
    visible: Visible,
    shape: tuple[int, int, int, int] | None = None,
  ) -> tuple[Float[Array, "B T N H"], "Scores", Mod | None]:
    """Prepares the scores of tiles.

    Args:
      query: `[B, T, N, H]`.
      visible: gates count as 1 at positions that its key masks exclude.
      shape: the shape of a tile, (B, N, C, D), for which `score_mod` is traced, with
        scores that vary over the same mesh axes as the query. If None, `score_mod` is
        not traced, and JAX differentiates the tile.

    Returns:
      The queries, multiplied by the scale if that is an array; the scores; and
      `score_mod` with only the arrays that have no gradient, or None.
    """
    scale, queries = self.scale, self.relative_queries
    if scale is None:
      scale = 1.0 / math.sqrt(query.shape[3])
    if isinstance(scale, jax.Array):
      if queries is not None:
        queries = queries * scale.astype(queries.dtype)
      query, scale = query * scale.astype(query.dtype), 1.0
    keys, gates = self.relative_keys, self.log_forget
    keys, queries = (
      x[None] if x is not None and x.ndim == 2 else x for x in (keys, queries)
    )
    if gates is not None:
      for mask in visible.masks:
        # Gates of masked positions count as 1, so padding never affects the output.
        if mask.shape[2] == 1:
          gates = jnp.where(jnp.swapaxes(mask[:, :, 0], 1, 2), gates, 0.0)
      gates = forget_sums(gates)
    mod = fixed = None
    if self.score_mod is not None:
      mod = mods_lib.untraced("score_mod", self.score_mod)
      if shape is not None:
        mod = mods_lib.traced_score(self.score_mod, shape, query)
        mod, fixed = mod.partition()
    scores = Scores(
      scale=float(scale),
      soft_cap=self.soft_cap,
      relative_bias=self.relative_bias,
      relative_keys=keys,
      relative_queries=queries,
      score_mod=mod,
      bias=self.bias,
      query_gates=gates,
      key_gates=gates,
    )
    return query, scores, fixed


PLAIN = Logits()
"""The products of queries and keys times 1/√H."""


class WindowOptions(VisibleOptions, total=False):
  """The keywords for visibility and for logits; see `dense_attention`.

  The decorator converts them to one `Visible` and one `Logits`.
  """

  scale: float | Float[Array, ""] | None
  relative_bias: Float[Array, "N D"] | None
  relative_keys: Float[Array, "... E H"] | None
  relative_queries: Float[Array, "... P H"] | None
  sinks: Float[Array, "... N"] | None
  logits_soft_cap: float | None
  log_forget: Float[Array, "B T N"] | None
  score_mod: ScoreMod | None
  mask_mod: MaskMod | None


class SoftmaxOptions(WindowOptions, total=False):
  """The keywords of functions that compute all pairs, which also take a bias."""

  bias: Float[Array, "..."] | None


def logits_from_options(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  visible: Visible,
  *,
  logits: Logits | None = None,
  **options: Any,
) -> Logits:
  """The `Logits` that the options of an attention function describe.

  `options` are keywords of `SoftmaxOptions`, none of which may be given together with
  `logits`. The function's decorator has checked them. It has not checked `logits`, nor
  that the `visible` option is causal if there are forget gates.

  Raises:
    ValueError: `logits` does not fit, or an option is given together with it.
  """
  is_causal = visible.right is not None and visible.right <= 0
  if logits is None:
    soft_cap = options.pop("logits_soft_cap", None)
    logits = Logits(soft_cap=soft_cap, **options)
    if is_causal or logits.log_forget is None:
      return logits
  elif not isinstance(logits, Logits):
    raise ValueError(f"logits: expected a Logits, got {type_name(logits)}")
  else:
    for name, option in options.items():
      if option is not None:
        raise ValueError(
          f"{name}: expected None together with logits, which has its own"
        )
  call = {"query": query, "key": key, "is_causal": is_causal}
  options = vars(logits) | {"logits_soft_cap": logits.soft_cap}
  checks.check_call(call | options)
  return logits


Pullback = Callable[[Array], tuple[Array, Array, Any]]
"""Maps the cotangent of the scores to the cotangents of queries `[B, N, C, H]`, of keys
`[B, K, D, H]` and of the arrays of the scores."""

_AXES = {"bias": (2, 3), "query_gates": (1, None), "key_gates": (None, 1)}
"""The query axis and the key axis of each array that has them."""

_TABLES = ("relative_bias", "relative_keys", "relative_queries")
_ARRAYS = (*_TABLES, "score_mod", *_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
  """The scores of tiles: `Logits` in the form that the loop over tiles slices.

  All its arrays are floats and have gradients.

  Attributes:
    scale: factor of the product.
    soft_cap: c in c · tanh(x / c).
    relative_bias: `[N, 2L+1]`.
    relative_keys: `[#N, 2L+1, H]`.
    relative_queries: `[#N, 2L+1, H]`.
    score_mod: a mod traced for a tile.
    bias: `[#B, #N, #T, #S]`.
    query_gates: `[B, T, N, 2]`, see `forget_sums`.
    key_gates: `[B, S, N, 2]`.
    dtype: the dtype of the scores.
  """

  scale: float = dataclasses.field(metadata=_STATIC)
  soft_cap: float | None = dataclasses.field(metadata=_STATIC)
  relative_bias: Any = None
  relative_keys: Any = None
  relative_queries: Any = None
  score_mod: Any = None
  bias: Any = None
  query_gates: Any = None
  key_gates: Any = None
  dtype: Any = dataclasses.field(default=jnp.float32, metadata=_STATIC)

  def cut(
    self, start: Array | int, rows: int, first: Array | int, width: int
  ) -> "Scores":
    """Slices the arrays of one tile."""
    slices, ranges = {}, ((start, first), (rows, width))
    for name, axes in _AXES.items():
      x = getattr(self, name)
      if x is not None:
        for axis, begin, size in zip(axes, *ranges, strict=True):
          if axis is not None and x.shape[axis] > 1:
            x = cut(x, begin, size, axis=axis)
        slices[name] = x
    return dataclasses.replace(self, **slices)

  def accumulate(
    self, tile: "Scores", start: Array | int, first: Array | int
  ) -> "Scores":
    """Adds the gradients of one tile's arrays to these totals."""
    totals = {}
    for name in _ARRAYS:
      axes = _AXES.get(name, (None, None))
      add = partial(_accumulate, axes=axes, start=start, first=first)
      totals[name] = jax.tree.map(add, getattr(self, name), getattr(tile, name))
    return dataclasses.replace(self, **totals)

  def tile(
    self,
    query: Float[Array, "B N C H"],
    key: Float[Array, "B K D H"],
    places: tuple[Array | int, Array | int],
    score_arrays: Mod | None = None,
  ) -> Float[Array, "B N C D"]:
    """The scores of a tile; `self` is the result of `cut` for this tile.

    Args:
      query: C queries.
      key: D keys.
      places: positions of the first query and the first key.
      score_arrays: `score_mod` with only the arrays that have no gradient.
    """
    x = self.product(query, key)
    return self.adjust(x, query, key, places, score_arrays)

  def vjp(
    self,
    query: Float[Array, "B N C H"],
    key: Float[Array, "B K D H"],
    places: tuple[Array | int, Array | int],
    score_arrays: Mod | None = None,
  ) -> tuple[Float[Array, "B N C D"], Pullback]:
    """The result of `tile`, and its pullback.

    The pullback computes products in the dtype of the queries; JAX's derivative would
    compute them in float32.
    """
    x, adjust_vjp = jax.vjp(
      lambda scores, *arrays: scores.adjust(*arrays, places, score_arrays),
      self,
      self.product(query, key),
      query,
      key,
    )

    def pullback(dx):
      dscores, dx, dquery, table_dkey = adjust_vjp(dx)
      dx = (dx * self.scale).astype(query.dtype)
      dkey = key_dot(dx, query, key.shape[1])
      if self.relative_queries is not None:
        dkey += table_dkey
      return dquery + query_dot("bkqd,bkdh->bkqh", dx, key), dkey, dscores

    return x, pullback

  def product(
    self, query: Float[Array, "B N C H"], key: Float[Array, "B K D H"]
  ) -> Float[Array, "B N C D"]:
    """The scaled products of queries and keys; additive attention overrides this."""
    return query_dot("bkqh,bkdh->bkqd", query, key, self.dtype) * self.scale

  def adjust(
    self,
    x: Float[Array, "B N C D"],
    query: Float[Array, "B N C H"],
    key: Float[Array, "B K D H"],
    places: tuple[Array | int, Array | int],
    score_arrays: Mod | None,
  ) -> Float[Array, "B N C D"]:
    """Applies soft cap, tables, `score_mod`, gates and bias to the products."""
    if self.soft_cap is not None:
      x = self.soft_cap * jnp.tanh(x / self.soft_cap)
    rows, width = x.shape[2:]
    start, first = places
    distance = first - start + jnp.arange(1 - rows, width)
    if self.relative_keys is not None:
      keys = _lookup(jnp.moveaxis(self.relative_keys, 2, 1), distance)
      keys = jnp.broadcast_to(keys, (x.shape[1], *keys.shape[1:]))
      products = jnp.einsum(
        "bnch,nhe->bnce", query.astype(x.dtype), keys.astype(x.dtype)
      )
      x += self.scale * _skew(products)
    if self.relative_queries is not None:
      table = jnp.moveaxis(self.relative_queries, 2, 1)
      queries = _lookup(table, distance[::-1])
      kv_heads = key.shape[1]
      queries = jnp.broadcast_to(queries, (x.shape[1], *queries.shape[1:]))
      queries = queries.reshape(kv_heads, -1, *queries.shape[1:])
      products = jnp.einsum(
        "bkdh,kghe->bkgde", key.astype(x.dtype), queries.astype(x.dtype)
      )
      # Rows are keys here, so distances run in the opposite direction.
      products = products.reshape(*x.shape[:2], width, -1)
      x += self.scale * jnp.swapaxes(_skew(products), 2, 3)
    if self.relative_bias is not None:
      terms = _lookup(self.relative_bias, distance).astype(x.dtype)
      shape = (x.shape[1], rows, terms.shape[1])
      x += _skew(jnp.broadcast_to(terms[:, None], shape))[None]
    if self.score_mod is not None:
      indices = mods_lib.indices(x.shape, start, first)
      score = self.score_mod(x, *indices, fixed=score_arrays)
      x = jnp.broadcast_to(jnp.asarray(score, x.dtype), x.shape)
    if self.query_gates is not None:
      sums = jnp.moveaxis(self.query_gates, 2, 1)[:, :, :, None]
      high_low = sums - jnp.moveaxis(self.key_gates, 2, 1)[:, :, None]
      x += (high_low[..., 0] + high_low[..., 1]).astype(x.dtype)
    if self.bias is not None:
      x += self.bias.astype(x.dtype)
    return x


def _accumulate(total, grad, axes, start, first):
  """Adds the gradient of a tile to `total`, at the indices that `cut` has sliced."""
  indices: list[Any] = [0] * total.ndim
  for axis, begin in zip(axes, (start, first), strict=True):
    if axis is not None and total.shape[axis] > 1:
      indices[axis] = begin
  grad = grad.astype(total.dtype)
  grad += jax.lax.dynamic_slice(total, indices, grad.shape)
  return jax.lax.dynamic_update_slice(total, grad, indices)


def _lookup(
  table: Float[Array, "*A E"], distance: Int[Array, "F"]
) -> Float[Array, "*A F"]:
  """The entries of a table of E = 2L+1 for distances, which are clipped to ±L."""
  return table[..., _index(table.shape[-1], distance)]


def _index(size: int, distance: Int[Array, "*A"]) -> Int[Array, "*A"]:
  """The index in a table of `size` = 2L+1 of a distance, which is clipped to ±L."""
  longest = size // 2
  return jnp.clip(distance, -longest, longest) + longest


def _skew(x: Float[Array, "*A C E"]) -> Float[Array, "*A C D"]:
  """Returns y[c, d] = x[c, d − c + C − 1], with E = C + D − 1.

  It pads rows to E + 1 numbers, flattens them and reshapes them to rows of E, which
  shifts each row one place further than the previous one. This avoids a gather.
  """
  *leading, rows, distances = x.shape
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
  x = x.reshape(*leading, rows * (distances + 1))
  x = jax.lax.slice_in_dim(x, rows - 1, rows - 1 + rows * distances, axis=-1)
  return x.reshape(*leading, rows, distances)[..., : distances - rows + 1]


def table_logits(
  relative_bias: Float[Array, "N D"] | None,
  relative_keys: Float[Array, "... E H"] | None,
  relative_queries: Float[Array, "... P H"] | None,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B S K H"],
  distance: Int[Array, "B #N S"],
  scale: float | Float[Array, ""] | None,
) -> Float[Array, "B N 1 S"] | None:
  """The terms that tables add to logits of one query per example, at any distances."""
  tables = relative_bias, relative_keys, relative_queries
  checks.check_call({"query": query, **dict(zip(_TABLES, tables, strict=True))})
  if all(table is None for table in tables):
    return None
  batch, _, num_heads, head_dim = query.shape
  factor = checks.softmax_scale(scale, head_dim)
  distance = jnp.broadcast_to(distance, (batch, num_heads, distance.shape[2]))
  total = jnp.zeros(distance.shape, jnp.float32)

  def at_distance(terms):
    terms = jnp.broadcast_to(terms, (batch, *terms.shape[1:]))
    return jnp.take_along_axis(terms, _index(terms.shape[2], distance), 2)

  if relative_bias is not None:
    total += at_distance(relative_bias.astype(jnp.float32)[None])
  if relative_keys is not None:
    spec = "bnh,eh->bne" if relative_keys.ndim == 2 else "bnh,neh->bne"
    total += at_distance(factor * dot(spec, query[:, 0], relative_keys))
  if relative_queries is not None:
    index = _index(relative_queries.shape[-2], distance)
    shape = num_heads, *relative_queries.shape[-2:]
    table = jnp.broadcast_to(relative_queries, shape)
    rows = table[jnp.arange(num_heads)[None, :, None], index]
    keys = jnp.repeat(jnp.moveaxis(key, 2, 1), num_heads // key.shape[2], 1)
    total += factor * dot("bnsh,bnsh->bns", keys, rows)
  return total[:, :, None]
