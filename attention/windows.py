"""What a window may have beyond neighbours: gaps, global tokens, other devices.

A dilated window is an ordinary window in another order. The positions of one
residue class r, t = i·d + r, see keys of the same class only, and within a class the
window is an ordinary one over i. `[B, T, N, H]` is read as `[B, T/d, d, N, H]`, which
moves no data and makes the class an axis, and `jax.vmap` runs all classes. Where d
does not divide T, the shorter classes are padded with keys that no query sees.

Near keys and global ones are disjoint sets, of which results are merged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped
import numpy as np

from attention import layout, sharded
from attention.logits import Logits, check_tables
from attention.loop import attend, merge
from attention.visible import Visible, key_mask, visible_from_options

Near = Callable[..., Any]
"""`(query, key, value, visible, logits, dropout_rng) -> (out, lse)` of a window."""


def dilated(near: Near, dilations: tuple[int, ...]) -> Near:
  """A window whose neighbouring keys are `dilations` apart, one for each query head.

  Of what it is called with, `visible` has key masks, segments and sides alone, and
  tables by distance count in steps of the dilation.
  """

  def call(query, key, value, visible, logits, rng=None):
    groups = _head_groups(dilations, key.shape[2])
    if len(groups) == 1:
      arrays = query, key, value
      return _dilated(near, dilations[0], arrays, visible, logits, rng)
    results, order = [], []
    for i, (dilation, heads, kv_heads) in enumerate(groups):
      heads, kv_heads = np.array(heads), np.array(kv_heads)
      arrays = query[:, :, heads], key[:, :, kv_heads], value[:, :, kv_heads]
      own_rng = None if rng is None else jax.random.fold_in(rng, i)
      own_logits = logits.of_heads(heads)
      results.append(
        _dilated(near, dilation, arrays, visible, own_logits, own_rng)
      )
      order.extend(heads)
    back = np.argsort(order)
    return tuple(
      jnp.concatenate(x, axis=2)[:, :, back] for x in zip(*results, strict=True)
    )

  return call


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


def _dilated(near, dilation, arrays, visible, logits, rng):
  """(out, lse) of heads with one dilation."""
  length, source_length = arrays[0].shape[1], arrays[1].shape[1]
  # With a step longer than the sequence, a query sees its own position only.
  dilation = min(dilation, max(length, source_length))
  if dilation == 1:
    return near(*arrays, visible, logits, rng)

  def classes(x):
    """[B, T, …] -> [B, ceil(T/d), d, …]."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % dilation)
    x = jnp.pad(x, pad)
    return x.reshape(len(x), -1, dilation, *x.shape[2:])

  def of_class(arrays, masks, segments, rng):
    limits = Visible(
      masks=tuple(mask[:, None, None] for mask in masks),
      segments=segments,
      left=None if visible.left is None else visible.left // dilation,
      right=None if visible.right is None else visible.right // dilation,
    )
    return near(*arrays, limits, logits, rng)

  masks = [mask[:, 0, 0] for mask in visible.masks]
  if source_length % dilation:
    masks.append(jnp.ones((1, source_length), bool))
  masks = [jnp.broadcast_to(x, (len(x), source_length)) for x in masks]
  rngs = None if rng is None else jax.random.split(rng, dilation)
  by_class = jax.tree.map(classes, (arrays, masks, visible.segments))
  run: Any = jax.vmap(of_class, (2, 2, 2, 0), 2)
  return tuple(
    x.reshape(len(x), -1, *x.shape[3:])[:, :length]
    for x in run(*by_class, rngs)
  )


class Tokens(NamedTuple):
  """The global tokens of a call, as one device sees them.

  Attributes:
    index: positions in the whole sequence; any where not `valid`.
    valid: True once for each position that is global.
    start: the whole's position of the first one here.
    length: T, positions here.
    axis_name: of the devices, where a sequence is in parts.
  """

  index: Int[Array, "B G"]
  valid: Bool[Array, "B G"]
  start: Any
  length: int
  axis_name: str | None

  @classmethod
  def of(
    cls, indices: Int[Array, "B G"], length: int, axis_name: str | None = None
  ) -> "Tokens":
    """The tokens of a call with `length` positions on each device."""
    whole, start = length, 0
    if axis_name is not None:
      whole = jax.lax.axis_size(axis_name) * length
      start = jax.lax.axis_index(axis_name) * length
    indices = jnp.sort(indices, axis=1)
    previous = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    valid = (indices >= 0) & (indices < whole) & (indices != previous)
    index = jnp.clip(indices, 0, whole - 1)
    return cls(index, valid, start, length, axis_name)

  @property
  def positions(self) -> Int[Array, "B T"]:
    """The whole's positions of those here."""
    here = self.start + jnp.arange(self.length)
    return jnp.broadcast_to(here[None], (len(self.index), self.length))

  @property
  def _slots(self) -> Int[Array, "B G"]:
    """Where the tokens are here; different places beyond T of those elsewhere."""
    slots = self.index - self.start
    is_here = self.valid & (slots >= 0) & (slots < self.length)
    beyond = self.length + jnp.arange(slots.shape[1])
    return jnp.where(is_here, slots, beyond[None])

  def others(self) -> Bool[Array, "B T"]:
    """False at the positions of the tokens, True elsewhere."""
    here = self._slots[:, None, :] == jnp.arange(self.length)[None, :, None]
    return ~jnp.any(here, axis=-1)

  def rows(self, x: Shaped[Array, "B T *F"]) -> Shaped[Array, "B G *F"]:
    """What `x` has at the tokens, on whichever device."""
    if self.axis_name is None:
      return layout.rows_at(x, self.index)
    slots = self._slots
    rows = layout.rows_at(x, jnp.minimum(slots, self.length - 1))
    is_here = (slots < self.length).reshape(*slots.shape, *[1] * (x.ndim - 2))
    rows = rows.astype(jnp.int32) if x.dtype == bool else rows
    rows = jax.lax.psum(jnp.where(is_here, rows, 0), self.axis_name)
    return rows.astype(x.dtype)

  def put(
    self, x: Shaped[Array, "B T *F"], rows: Shaped[Array, "B G *F"]
  ) -> Shaped[Array, "B T *F"]:
    """`x` with the rows of the tokens replaced."""
    return jax.vmap(
      lambda old, slot, new: old.at[slot].set(
        new, mode="drop", unique_indices=True
      )
    )(x, self._slots, rows)


def with_tokens(
  near: Near,
  tokens: Tokens,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  visible: Visible,
  logits: Logits,
  global_qkv: tuple[Array, Array, Array] | None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of a window with global tokens.

  `visible` has key masks, segments and sides, and `logits` have no sinks. `global_qkv`
  is what the global queries are, and look at.
  """
  rngs: Any = (None,) * 3
  if dropout_rng is not None:
    rngs = jax.random.split(dropout_rng, 3)

  def all_rows(x):
    return x

  # The keys of the window without global ones, and the global ones.
  def attended(query, key, value, visible, rng):
    options = {"dropout_rate": dropout_rate, "dropout_rng": rng}
    return attend(query, key, value, visible, logits, **options)

  here, there = (all_rows, tokens.positions), (tokens.rows, tokens.index)
  # The keys of the window without global ones, and the global ones.
  others = visible & key_mask(tokens.others())
  seen = visible.between(here, there) & key_mask(tokens.valid)
  global_keys = tokens.rows(key), tokens.rows(value)
  out, lse = merge(
    near(query, key, value, others, logits, rngs[0]),
    attended(query, *global_keys, seen, rngs[1]),
  )
  # Global queries see all keys; their rows replace those of the window.
  query, key, value = global_qkv or (query, key, value)
  seeing = visible.between(there, here)
  rows = attended(tokens.rows(query), key, value, seeing, rngs[2])
  if tokens.axis_name is not None:
    rows = sharded.merged_over(tokens.axis_name, *rows)
  return tokens.put(out, rows[0]), tokens.put(lse, rows[1])


def attention_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  near: Near,
  reach: tuple[int, int],
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  global_indices: Int[Array, "B G"] | None = None,
  global_qkv: tuple[Array, Array, Array] | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`sliding_window_attention` of the whole, of which each device has a part.

  The window `near` reaches so many positions before and behind a query. Every device
  gets the keys that it reaches and attends to the longer stretch. Of global tokens,
  whose indices are those in the whole, every device gets queries, keys and values by
  one sum over the devices.

  Cost: that of the window on T + L + R positions, which it reaches before and
  behind. What crosses is L + R positions of keys and values, from ⌈L/T⌉ and ⌈R/T⌉
  devices, and of G global tokens queries, keys, values and results.
  """
  options = {
    "mask": mask,
    "is_causal": is_causal,
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
  }
  sharded.check(query, key, value, **options, others=others)
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the positions of the queries, {length} on a device, got "
      f"{key.shape[1]}; a window over a sequence in parts is of one sequence"
    )
  check_tables(relative_bias, relative_keys, query)
  logits = Logits(
    scale=scale, relative_bias=relative_bias, relative_keys=relative_keys
  )
  check_globals(global_indices, global_qkv, query, key, value, logits)
  visible = visible_from_options(query, key, **options)
  # Farther devices there are none.
  elsewhere = (jax.lax.axis_size(axis_name) - 1) * length
  left, right = (min(side, elsewhere) for side in reach)
  near = _in_parts(near, left, right, axis_name)
  arrays = query, key, value, visible, logits
  if global_indices is None or global_indices.shape[1] == 0:
    return near(*arrays)[0]
  tokens = Tokens.of(global_indices, length, axis_name)
  return with_tokens(near, tokens, *arrays, global_qkv)[0]


def _in_parts(near: Near, left: int, right: int, axis_name: str) -> Near:
  """A window over the keys of this device, `left` before and `right` behind them."""

  def reached(x):
    return sharded.reached(x, left, right, axis_name)

  def padded(x):
    return jnp.pad(x, [(0, 0), (left, right), *[(0, 0)] * (x.ndim - 2)])

  def call(query, key, value, visible, logits, rng=None):
    length = query.shape[1]
    keep = jnp.ones(key.shape[:2], bool)
    for mask in visible.masks:
      keep &= mask[:, 0, 0]
    stretch = Visible(
      masks=(reached(keep)[:, None, None],),
      segments=tuple((padded(x), reached(y)) for x, y in visible.segments),
    )
    arrays = padded(query), reached(key), reached(value)
    out, lse = near(*arrays, stretch, logits, rng)
    return out[:, left : left + length], lse[:, left : left + length]

  return call


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
