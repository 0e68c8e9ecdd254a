"""A window over positions, with one dilation for each query head; global tokens.

A dilated window is an ordinary window in another order. The positions of one
residue class r, t = i·d + r, see keys of the same class only, and within a class the
window is an ordinary one over i. `[B, T, N, H]` is read as `[B, T/d, d, N, H]`, which
moves no data and makes the class an axis, and `jax.vmap` runs all classes. Where d
does not divide T, the shorter classes are padded with keys that no query sees.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped
import numpy as np

from attention import layout
from attention.logits import Logits
from attention.loop import attend, with_sinks
from attention.visible import Visible, window


class Window(NamedTuple):
  """Softmax attention of every query to the keys near it.

  Attributes:
    sides: keys before and behind a query.
    dilations: distance of neighbouring keys, of each query head.
    rows: C, queries of a tile; None is the platform's choice.
    dropout_rate: share of weights set to zero.
  """

  sides: tuple[int, int]
  dilations: tuple[int, ...]
  rows: int | None = None
  dropout_rate: float = 0.0

  def __call__(
    self,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    visible: Visible,
    logits: Logits,
    rng: Array | None = None,
  ) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """(out, lse), in one call for the heads of each dilation.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, K, H]`.
      value: `[B, S, K, V]`.
      visible: which pairs count besides; with a dilation of key masks, segments and
        sides alone.
      logits: how they are scored; tables by distance count in steps of the dilation.
      rng: key of the dropout.
    """
    groups = _head_groups(self.dilations, key.shape[2])
    sinks, logits = logits.sinks, dataclasses.replace(logits, sinks=None)
    if len(groups) == 1:
      dilation = self.dilations[0]
      out, lse = self._of_heads(
        dilation, query, key, value, visible, logits, rng
      )
    else:
      results, order = [], []
      for i, (dilation, query_heads, key_heads) in enumerate(groups):
        heads, kv_heads = np.array(query_heads), np.array(key_heads)
        results.append(
          self._of_heads(
            dilation,
            query[:, :, heads],
            key[:, :, kv_heads],
            value[:, :, kv_heads],
            visible,
            logits.of_heads(heads),
            None if rng is None else jax.random.fold_in(rng, i),
          )
        )
        order += query_heads
      back = np.argsort(order)
      out, lse = (
        jnp.concatenate(x, axis=2)[:, :, back]
        for x in zip(*results, strict=True)
      )
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

  def _of_heads(self, dilation, query, key, value, visible, logits, rng):
    """Heads with one dilation."""

    def attended(query, key, value, visible, rng):
      return attend(
        query,
        key,
        value,
        visible & window(*self.sides),
        logits,
        block=(self.rows, None),
        dropout_rate=self.dropout_rate,
        dropout_rng=rng,
      )

    length, source_length = query.shape[1], key.shape[1]
    # With a step longer than the sequence, a query sees its own position only.
    dilation = min(dilation, max(length, source_length))
    if dilation == 1:
      return attended(query, key, value, visible, rng)

    def classes(x):
      """[B, T, …] -> [B, ceil(T/d), d, …]."""
      pad = [(0, 0)] * x.ndim
      pad[1] = (0, -x.shape[1] % dilation)
      x = jnp.pad(x, pad)
      return x.reshape(len(x), -1, dilation, *x.shape[2:])

    # Positions that pad the shorter classes are hidden.
    masks = [jnp.ones((1, source_length), bool)] * (
      source_length % dilation > 0
    )
    for mask in visible.masks:
      mask = mask[:, 0, 0]
      masks.append(jnp.broadcast_to(mask, (len(mask), source_length)))

    def of_class(query, key, value, masks, segments, rng) -> Any:
      limits = Visible(
        masks=tuple(mask[:, None, None] for mask in masks),
        segments=segments,
        left=None if visible.left is None else visible.left // dilation,
        right=None if visible.right is None else visible.right // dilation,
      )
      return attended(query, key, value, limits, rng)

    arrays: Any = jax.tree.map(
      classes, (query, key, value, masks, visible.segments)
    )
    rngs = None if rng is None else jax.random.split(rng, dilation)
    run: Any = jax.vmap(of_class, (2, 2, 2, 2, 2, 0), 2)
    results = run(*arrays, rngs)
    return tuple(
      x.reshape(len(x), -1, *x.shape[3:])[:, :length] for x in results
    )


class Tokens(NamedTuple):
  """The global tokens; where not `valid`, `index` is any position in [0, T)."""

  index: Int[Array, "B G"]
  valid: Bool[Array, "B G"]

  @classmethod
  def of(cls, indices: Int[Array, "B G"], length: int) -> "Tokens":
    """The tokens of a call; valid once for each position in [0, T)."""
    indices = jnp.sort(indices, axis=1)
    previous = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    valid = (indices >= 0) & (indices < length) & (indices != previous)
    return cls(jnp.clip(indices, 0, length - 1), valid)

  def others(self, length: int) -> Bool[Array, "B S"]:
    """False at the positions of the tokens, True elsewhere."""
    position = jnp.arange(length)[None, :, None]
    here = (self.index[:, None, :] == position) & self.valid[:, None, :]
    return ~jnp.any(here, axis=-1)

  def rows(self, x: Shaped[Array, "B T *F"]) -> Shaped[Array, "B G *F"]:
    """What `x` has at the tokens."""
    return layout.rows_at(x, self.index)

  def keys(
    self, x: Float[Array, "B T K H"], seen: Bool[Array, "B T G"]
  ) -> Float[Array, "B G K H"]:
    """Keys or values of the tokens, zero where no query sees them."""
    is_read = jnp.any(seen, axis=1)[:, :, None, None]
    return jnp.where(is_read, self.rows(x), 0)

  def put(
    self, x: Shaped[Array, "B T *F"], rows: Shaped[Array, "B G *F"]
  ) -> Shaped[Array, "B T *F"]:
    """`x` with the rows of the tokens replaced."""
    # Slots that are not valid get different indices beyond T and are dropped.
    beyond = x.shape[1] + jnp.arange(self.index.shape[1])
    slots = jnp.where(self.valid, self.index, beyond[None, :])
    return jax.vmap(
      lambda old, slot, new: old.at[slot].set(
        new, mode="drop", unique_indices=True
      )
    )(x, slots, rows)


def check_globals(
  indices: Int[Array, "B G"] | None,
  global_qkv: tuple[Array, Array, Array] | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  logits: Logits,
) -> None:
  """Checks the two arguments of the global tokens."""
  if indices is None:
    if global_qkv is not None:
      raise ValueError(
        "global_qkv: expected global_indices beside it, got None; it projects "
        "the tokens that they name"
      )
    return
  if logits.relative_bias is not None or logits.relative_keys is not None:
    raise ValueError(
      "global_indices: expected None beside relative_bias and relative_keys, "
      "which are indexed by the place in the window; a global key has none"
    )
  if (
    indices.ndim != 2
    or indices.shape[0] != query.shape[0]
    or not jnp.issubdtype(indices.dtype, jnp.integer)
  ):
    raise ValueError(
      f"global_indices: expected integers of shape [{query.shape[0]}, G], got "
      f"{indices.dtype} {indices.shape}"
    )
  if query.shape[1] != key.shape[1]:
    raise ValueError(
      "global_indices: expected query and key of one sequence, got lengths "
      f"{query.shape[1]} and {key.shape[1]}; use dense attention across"
    )
  if global_qkv is None:
    return
  expected = [x.shape for x in (query, key, value)]
  got = [x.shape for x in global_qkv]
  if got != expected:
    raise ValueError(
      f"global_qkv: expected the shapes of query, key and value {expected}, "
      f"got {got}"
    )


def _head_groups(
  dilations: tuple[int, ...], num_kv_heads: int
) -> list[tuple[int, list[int], list[int]]]:
  """Heads that one call can serve: (dilation, query heads, key heads).

  In one call, every key head has the same number of query heads, as tiles
  require. A key head whose query heads have several dilations is in several
  calls.
  """
  group = len(dilations) // num_kv_heads
  calls: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
  for kv_head in range(num_kv_heads):
    heads = range(kv_head * group, (kv_head + 1) * group)
    for dilation in sorted({dilations[n] for n in heads}):
      mine = [n for n in heads if dilations[n] == dilation]
      call = calls.setdefault((dilation, len(mine)), ([], []))
      call[0].extend(mine)
      call[1].append(kv_head)
  return [(dilation, *heads) for (dilation, _), heads in calls.items()]
