"""Windows with dilation, with global tokens and over sequence shards.

Positions t = i·d + r of one residue class r see only keys of the same class, and within
a class, a window of dilation d is a plain window over i. Reshaping `[B, T, N, H]` to
`[B, T/d, d, N, H]` moves no data and makes the class an axis, over which `jax.vmap`
maps. If d does not divide T, the shorter classes are padded with keys that no query
sees.

Window keys and global keys are disjoint sets, whose results are merged. In all
functions, `visible` has only key masks, segments and sides, and `logits` have no sinks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention.platform import layout
from attention.platform.blocks import split_blocks
from attention.softmax import dropout, sharding
from attention.softmax.logits import Logits
from attention.softmax.rows import merge
from attention.softmax.tiles import attend
from attention.softmax.visible import Visible, key_mask


def attend_to_window(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible,
  logits: Logits,
  rng: Array | None = None,
  *,
  sides: tuple[int, int],
  dilations: tuple[int, ...],
  **options: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of a window, which may be dilated.

  `sides` are (left, right), counted in steps of the dilation like the distances of
  tables. `dilations` has one number per query head. Other options are those of
  `tiles.attend`.
  """
  length, source_length = query.shape[1], key.shape[1]
  longest = max(length, source_length)
  # With a dilation as long as the sequence, a query sees only its own position.
  dilations = tuple(min(dilation, longest) for dilation in dilations)
  if len(set(dilations)) > 1:
    options |= {"sides": sides, "dilations": dilations}
    return _attend_with_dilations(
      query, key, value, visible, logits, rng, **options
    )
  dilation = dilations[0]
  left, right = (dilation * min(side, longest) for side in sides)
  limits: Any = visible & Visible(left=left, right=right)
  if dilation == 1:
    return attend(query, key, value, limits, logits, dropout_rng=rng, **options)

  def attend_to_class(query, key, value, masks, segments, rng):
    class_visible = Visible(
      masks=tuple(mask[:, None, None] for mask in masks),
      segments=segments,
      left=limits.left // dilation,
      right=limits.right // dilation,
    )
    return attend(
      query, key, value, class_visible, logits, dropout_rng=rng, **options
    )

  masks = [mask[:, 0, 0] for mask in visible.masks]
  if source_length % dilation:
    masks.append(jnp.ones((1, source_length), bool))
  masks = [jnp.broadcast_to(x, (x.shape[0], source_length)) for x in masks]
  rngs = None if rng is None else dropout.split(rng, dilation)
  classes = jax.tree.map(
    partial(split_blocks, size=dilation),
    (query, key, value, masks, visible.segments),
  )
  run: Any = jax.vmap(attend_to_class, (*[2] * 5, 0), 2)
  out, lse = (
    x.reshape(x.shape[0], -1, *x.shape[3:]) for x in run(*classes, rngs)
  )
  return out[:, :length], lse[:, :length]


def _attend_with_dilations(
  query, key, value, visible, logits, rng, *, dilations, **options
) -> Any:
  """(out, lse) of heads with different dilations.

  Tiles need the same number of query heads for every key head, so a key head whose
  query heads have different dilations is in several calls.
  """
  calls: dict[tuple[int, int], list[Any]] = {}
  for kv_head, own in enumerate(np.reshape(dilations, (key.shape[2], -1))):
    for dilation in np.unique(own):
      heads = kv_head * len(own) + np.flatnonzero(own == dilation)
      call = calls.setdefault((int(dilation), len(heads)), [])
      call.append((kv_head, heads))
  results, order, rngs = [], [], None
  if rng is not None:
    rngs = dropout.split(rng, len(calls), heads_differ=True)
  for i, ((dilation, _), pairs) in enumerate(calls.items()):
    kv_heads, heads = (np.hstack(x) for x in zip(*pairs, strict=True))
    results.append(
      attend_to_window(
        query[:, :, heads],
        key[:, :, kv_heads],
        value[:, :, kv_heads],
        visible,
        logits.select_heads(heads),
        rngs if rngs is None else rngs[i],
        dilations=(dilation,),
        **options,
      )
    )
    order.extend(heads)
  inverse = np.argsort(order)
  return tuple(
    jnp.concatenate(x, axis=2)[:, :, inverse]
    for x in zip(*results, strict=True)
  )


def _attend_to_shards(
  query, key, value, visible, logits, rng, *, axis_name, **options
):
  """(out, lse) of a window where each device has a shard of the sequence.

  Every device receives the keys that its window reaches, and attends to the extended
  shard.
  """
  length, dilation = query.shape[1], max(options["dilations"])
  # A window reaches at most all other devices.
  others = (jax.lax.axis_size(axis_name) - 1) * length
  left, right = (
    min(side * dilation, others, others if limit is None else limit)
    for side, limit in zip(
      options["sides"], (visible.left, visible.right), strict=True
    )
  )

  def extend(x):
    return sharding.exchange_halo(x, left, right, axis_name)

  def pad(x):
    return jnp.pad(x, [(0, 0), (left, right), *[(0, 0)] * (x.ndim - 2)])

  keep = jnp.ones(key.shape[:2], bool)
  for mask in visible.masks:
    keep &= mask[:, 0, 0]
  extended = Visible(
    masks=(extend(keep)[:, None, None],),
    segments=tuple((pad(x), extend(y)) for x, y in visible.segments),
    left=visible.left,
    right=visible.right,
  )
  arrays = pad(query), extend(key), extend(value)
  results = attend_to_window(*arrays, extended, logits, rng, **options)
  return tuple(x[:, left : left + length] for x in results)


def attend_to_union(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible,
  logits: Logits,
  *,
  global_indices: Int[Array, "B G"] | None,
  global_qkv: tuple[Array, Array, Array] | None,
  axis_name: str | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  **window: Any,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of a window and global tokens.

  `global_qkv` has the global queries, and the keys and values that they attend to.
  `window` has arguments of `attend_to_window`. With `axis_name`, each device has a
  shard of the sequence.
  """
  local: Any = attend_to_window
  if axis_name is not None:
    local = partial(_attend_to_shards, axis_name=axis_name)
  local = partial(local, logits=logits, dropout_rate=dropout_rate, **window)
  if global_indices is None or global_indices.shape[1] == 0:
    return local(query, key, value, visible, rng=dropout_rng)
  rngs: Any = (None,) * 3
  if dropout_rng is not None:
    rngs = dropout.split(dropout_rng, 3)

  length = query.shape[1]
  start, total_length = 0, length
  if axis_name is not None:
    start = jax.lax.axis_index(axis_name) * length
    total_length = jax.lax.axis_size(axis_name) * length
  index = jnp.sort(global_indices, axis=1)
  is_token = (index >= 0) & (index < total_length)
  is_token &= jnp.diff(index, prepend=-1) != 0
  local_index = index - start
  is_local = is_token & (local_index >= 0) & (local_index < length)
  # Tokens of other devices, and invalid ones, get distinct indices beyond T.
  local_index = jnp.where(
    is_local, local_index, length + jnp.arange(index.shape[1])[None]
  )

  def global_rows(x):
    """The rows of global tokens, from any device; arbitrary for invalid indices."""
    rows = layout.rows_at(x, local_index)
    if axis_name is None:
      return rows
    is_own = is_local.reshape(*is_local.shape, *[1] * (x.ndim - 2))
    rows = jax.lax.psum(jnp.where(is_own, rows, 0), axis_name)
    return rows.astype(x.dtype)

  @jax.vmap
  def put(x, rows, index):
    """Replaces the rows of `x` at the global tokens."""
    return x.at[index].set(rows, mode="drop", unique_indices=True)

  def attend_exactly(query, key, value, visible, rng):
    options = {"dropout_rate": dropout_rate, "dropout_rng": rng}
    return attend(query, key, value, visible, logits, **options)

  positions = jnp.broadcast_to(start + jnp.arange(length), query.shape[:2])
  all_rows, tokens = (lambda x: x, positions), (global_rows, index)
  # All queries attend to the window's keys without global ones, and to global keys.
  is_other = put(jnp.ones_like(positions, bool), ~is_local, local_index)
  out, lse = merge(
    local(query, key, value, visible & key_mask(is_other), rng=rngs[0]),
    attend_exactly(
      query,
      global_rows(key),
      global_rows(value),
      visible.select(all_rows, tokens) & key_mask(is_token),
      rngs[1],
    ),
  )
  # Global queries attend to all keys; their results replace those of the window.
  query, key, value = global_qkv or (query, key, value)
  visible = visible.select(tokens, all_rows)
  results = attend_exactly(global_rows(query), key, value, visible, rngs[2])
  if axis_name is not None:
    results = sharding.merge_over_devices(axis_name, *results)
  return put(out, results[0], local_index), put(lse, results[1], local_index)


def check_globals(
  global_indices: Int[Array, "B G"] | None,
  global_qkv: tuple[Array, Array, Array] | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  logits: Logits,
) -> None:
  """Checks the arguments for global tokens."""
  if global_indices is None:
    if global_qkv is not None:
      raise ValueError(
        "global_qkv: expected global_indices as well, got None; its "
        "arrays are projections of the tokens at these indices"
      )
    return
  tables = logits.relative_bias, logits.relative_keys, logits.relative_queries
  if any(table is not None for table in tables):
    raise ValueError(
      "global_indices: expected None with relative_bias, relative_keys or "
      "relative_queries, which are indexed by the distance in the window, but a "
      "global key may have any distance"
    )
  is_integer = jnp.issubdtype(global_indices.dtype, jnp.integer)
  if (
    global_indices.ndim != 2
    or global_indices.shape[0] != query.shape[0]
    or not is_integer
  ):
    raise ValueError(
      f"global_indices: expected integers of shape [{query.shape[0]}, G], got "
      f"{global_indices.dtype} {global_indices.shape}"
    )
  if query.shape[1] != key.shape[1]:
    raise ValueError(
      "global_indices: expected query and key of one sequence, got lengths "
      f"{query.shape[1]} and {key.shape[1]}; use dense attention for "
      "cross-attention"
    )
  expected = [x.shape for x in (query, key, value)]
  got = [x.shape for x in global_qkv or (query, key, value)]
  if got != expected:
    raise ValueError(
      f"global_qkv: expected the shapes of query, key and value {expected}, "
      f"got {got}"
    )
