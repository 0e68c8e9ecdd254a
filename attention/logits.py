"""What makes the score of a query and a key: one value, `Logits`.

    x = scale · q kᵀ  →  soft cap  →  tables by distance  →  score_mod  →  bias, gates

At the distance i = clip(s − t, −L, L) of key and query, the tables add

  relative_bias  b ∈ [N, 2L+1]    + b[n, L + i]                  (T5, ALiBi)
  relative_keys  a ∈ [2L+1, H]    + scale · q_t · a[L + i]       (Shaw et al.)
                 a ∈ [N, 2L+1, H] + scale · q_t · a[n, L + i]    (Transformer-XL)

and forget gates add Σ log f_u over s < u ≤ t. All terms are linear in memory: a tile
of C queries and D keys meets C + D − 1 distances only. Everything behind the product
is a plain function, which `jax.vjp` differentiates in the tile.

Papers: Self-attention with relative position representations, arXiv:1803.02155;
Transformer-XL, arXiv:1901.02860; T5, arXiv:1910.10683; ALiBi, arXiv:2108.12409;
forget gates: Forgetting transformer, arXiv:2503.02130; soft caps: Gemma 2,
arXiv:2408.00118; sinks: gpt-oss, arXiv:2508.10925.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import arguments, forgetting, layout, relative
from attention import mods as mods_lib
from attention.mods import ScoreMod
from attention.visible import Visible

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logits:
  """What is done to the product of a query and a key.

  It is a pytree, except for `soft_cap` and `score_mod`.

  Attributes:
    scale: factor of the product; None is 1/√H.
    soft_cap: c of c · tanh(x / c).
    relative_bias: `[N, 2L+1]`, added by clipped distance.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, keys by clipped distance.
    score_mod: (score, b, n, t, s) -> score.
    bias: broadcastable to `[B, N, T, S]`, added.
    log_forget: `[B, T, N]`, logarithms of forget gates, for causal calls, T = S.
    sinks: `[N]`, one more logit for each head, which takes weight and gives no value.
  """

  scale: Any = None
  soft_cap: float | None = dataclasses.field(default=None, metadata=_STATIC)
  relative_bias: Any = None
  relative_keys: Any = None
  score_mod: ScoreMod | None = dataclasses.field(default=None, metadata=_STATIC)
  bias: Any = None
  log_forget: Any = None
  sinks: Any = None

  def of_heads(self, heads: Any) -> "Logits":
    """The tables of some of the heads."""
    bias, keys = self.relative_bias, self.relative_keys
    return dataclasses.replace(
      self,
      relative_bias=bias if bias is None else bias[heads],
      relative_keys=keys if keys is None or keys.ndim == 2 else keys[heads],
    )

  def scores(
    self,
    query: Float[Array, "B T N H"],
    visible: Visible,
    shape: tuple[int, int, int, int],
  ) -> tuple[Float[Array, "B T N H"], "Scores", tuple[Array, ...]]:
    """What `attention.loop` works with, for tiles (B, N, C, D).

    Returns:
      The queries, which a traced scale is multiplied into; the scores; arrays of
      `score_mod` that have no gradient.
    """
    query, scale = arguments.scaled_query(query, self.scale)
    keys, gates = self.relative_keys, self.log_forget
    if keys is not None and keys.ndim == 2:
      keys = keys[None]
    if gates is not None:
      for mask in visible.masks:
        # What nobody sees forgets nothing, so padding changes no result.
        if mask.shape[2] == 1:
          gates = jnp.where(jnp.swapaxes(mask[:, :, 0], 1, 2), gates, 0.0)
      gates = forgetting.cumulated(gates)
    mod, fixed = None, ()
    if self.score_mod is not None:
      mod, fixed = mods_lib.traced_score(self.score_mod, shape).divided()
    scores = Scores(
      scale=scale,
      soft_cap=self.soft_cap,
      relative_bias=self.relative_bias,
      relative_keys=keys,
      score_mod=mod,
      bias=self.bias,
      query_gates=gates,
      key_gates=gates,
    )
    return query, scores, fixed


def logits_from_options(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  visible: Visible,
  *,
  logits: Logits | None = None,
  **options: Any,
) -> Logits:
  """What the options of an attention function say of its logits, checked.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    visible: which pairs count, for forget gates.
    logits: all of it in one value.
    **options: fields of `Logits`, of which none may be given beside `logits`.

  Raises:
    ValueError: one does not fit, or `logits` and an option are given.
  """
  if logits is None:
    logits = Logits(**options)
  elif not isinstance(logits, Logits):
    raise ValueError(f"logits: expected a Logits, got {type(logits).__name__}")
  else:
    for name, option in options.items():
      if option is not None:
        raise ValueError(
          f"{name}: expected None beside logits, which has its own"
        )
  arguments.check_logit_options(
    query,
    key,
    visible.right is not None and visible.right <= 0,
    sinks=logits.sinks,
    logits_soft_cap=logits.soft_cap,
    log_forget=logits.log_forget,
  )
  relative.check(logits.relative_bias, logits.relative_keys, query)
  if logits.bias is not None:
    batch, length, num_heads, _ = query.shape
    shape = (batch, num_heads, length, key.shape[1])
    arguments.check_broadcast("bias", logits.bias, shape)
  if logits.score_mod is not None:
    mods_lib.untraced("score_mod", logits.score_mod)
  return logits


Pull = Callable[[Array], tuple[Array, Array, Any]]
"""Cotangent of the scores -> those of queries `[B, K, Q, H]`, of keys
`[B, K, H, D]`, transposed, and of the arrays of the scores."""

_AXES = {"bias": (2, 3), "query_gates": (1, None), "key_gates": (None, 1)}
"""The axes of queries and of keys, of the arrays that have any."""

_ARRAYS = ("relative_bias", "relative_keys", "score_mod", *_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
  """The scores of tiles: `Logits` in the form that the loop cuts and adds up.

  All its arrays are floats and have gradients.

  Attributes:
    scale: factor of the product.
    soft_cap: c of c · tanh(x / c).
    relative_bias: `[N, 2L+1]`.
    relative_keys: `[#N, 2L+1, H]`.
    score_mod: traced for a tile.
    bias: `[#B, #N, #T, #S]`.
    query_gates: `[B, T, N, 2]`, see `attention.forgetting`.
    key_gates: `[B, S, N, 2]`.
  """

  scale: float = dataclasses.field(metadata=_STATIC)
  soft_cap: float | None = dataclasses.field(metadata=_STATIC)
  relative_bias: Any = None
  relative_keys: Any = None
  score_mod: Any = None
  bias: Any = None
  query_gates: Any = None
  key_gates: Any = None

  @property
  def is_product(self) -> bool:
    """Whether a score is the scaled product."""
    arrays = (getattr(self, name) for name in _ARRAYS)
    return self.soft_cap is None and all(x is None for x in arrays)

  def cut(
    self, start: Array | int, rows: int, first: Array | int, width: int
  ) -> "Scores":
    """The arrays of one tile."""
    parts = {}
    for name, axes in _AXES.items():
      x = getattr(self, name)
      if x is not None:
        for axis, place, size in zip(
          axes, (start, first), (rows, width), strict=True
        ):
          if axis is not None and x.shape[axis] > 1:
            x = layout.cut(x, place, size, axis)
        parts[name] = x
    return dataclasses.replace(self, **parts)

  def added(
    self, tile: "Scores", start: Array | int, first: Array | int
  ) -> "Scores":
    """These totals with the gradients of the arrays of one tile."""
    totals = {}
    for name in _ARRAYS:
      axes = _AXES.get(name, (None, None))
      totals[name] = jax.tree.map(
        lambda total, part, axes=axes: _added(total, part, axes, start, first),
        getattr(self, name),
        getattr(tile, name),
      )
    return dataclasses.replace(self, **totals)

  def of_tile(
    self,
    query: Float[Array, "B K Q H"],
    key: Float[Array, "B K D H"],
    rows: int,
    positions: tuple[Array | int, Array | int],
    fixed: tuple[Array, ...],
  ) -> Float[Array, "B K Q D"]:
    """The scores of a tile; self is `cut` for it.

    Args:
      query: Q = J·C rows, the J heads of a key head one after another.
      key: D keys.
      rows: C.
      positions: of the first query and key.
      fixed: arrays of `score_mod` without a gradient.
    """
    x = self._product(query, key)
    return (
      x if self.is_product else self._after(x, query, rows, positions, fixed)
    )

  def vjp(
    self,
    query: Float[Array, "B K Q H"],
    key: Float[Array, "B K D H"],
    rows: int,
    positions: tuple[Array | int, Array | int],
    fixed: tuple[Array, ...],
  ) -> tuple[Float[Array, "B K Q D"], Pull]:
    """`of_tile`, and what takes the cotangent of its result further."""
    x, pull_after = self._product(query, key), None
    if not self.is_product:
      x, pull_after = jax.vjp(
        lambda x, query, scores: scores._after(
          x, query, rows, positions, fixed
        ),
        x,
        query,
        self,
      )

    def pull(dx):
      dscores, dquery = self, 0.0
      if pull_after is not None:
        dx, dquery, dscores = pull_after(dx)
      dx = (dx * self.scale).astype(query.dtype)
      # Turning the queries keeps this product one of XLA:CPU's fast forms.
      dkey = layout.dot("bkhq,bkqd->bkhd", layout.turned(query), dx)
      dquery += layout.dot("bkqd,bkdh->bkqh", dx, key)
      return dquery, dkey, dscores

    return x, pull

  def _product(self, query, key):
    return layout.dot("bkqh,bkdh->bkqd", query, key) * self.scale

  def _after(self, x, query, rows, positions, fixed):
    """What follows the product."""
    batch, kv_heads, _, width = x.shape
    if self.soft_cap is not None:
      x = self.soft_cap * jnp.tanh(x / self.soft_cap)
    x = x.reshape(batch, -1, rows, width)
    start, first = positions
    distance = first - start + jnp.arange(1 - rows, width)
    if self.relative_keys is not None:
      query = query.reshape(*x.shape[:3], -1).astype(jnp.float32)
      keys = relative.at_distance(
        jnp.moveaxis(self.relative_keys, 2, 1), distance
      )
      keys = jnp.broadcast_to(keys, (x.shape[1], *keys.shape[1:]))
      products = layout.dot("bnch,nhe->bnce", query, keys.astype(jnp.float32))
      x += self.scale * relative.skew(products)
    if self.relative_bias is not None:
      terms = relative.at_distance(self.relative_bias, distance).astype(
        jnp.float32
      )
      shape = (x.shape[1], rows, terms.shape[1])
      terms = jnp.broadcast_to(terms[:, None], shape)
      x += relative.skew(terms)[None]
    if self.score_mod is not None:
      x = self.score_mod(x, *self.score_mod.indices(start, first), fixed=fixed)
    if self.query_gates is not None:
      rows_sums = jnp.moveaxis(self.query_gates, 2, 1)[:, :, :, None]
      high_low = rows_sums - jnp.moveaxis(self.key_gates, 2, 1)[:, :, None]
      x += high_low[..., 0] + high_low[..., 1]
    if self.bias is not None:
      x += self.bias.astype(jnp.float32)
    return x.reshape(batch, kv_heads, -1, width)


def _added(total, part, axes, start, first):
  """`total` with the gradient of a tile added where `cut` took its array."""
  at: list[Any] = [0] * total.ndim
  for axis, place in zip(axes, (start, first), strict=True):
    if axis is not None and total.shape[axis] > 1:
      at[axis] = place
  part = part.astype(total.dtype)
  part += jax.lax.dynamic_slice(total, at, part.shape)
  return jax.lax.dynamic_update_slice(total, part, at)
