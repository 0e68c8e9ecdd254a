"""Dilated windows of `sliding_window_attention`, one dilation per query head.

A dilated window is an ordinary window in another order. The positions of one
residue class r, t = i·d + r, see keys of the same class only, and within a
class the window is an ordinary one over i. `[B, T, N, H]` is read as
`[B, T/d, d, N, H]`, which moves no data and makes the class an axis, and
`jax.vmap` runs all classes. Where d does not divide T, the shorter classes are
padded with keys that no query sees.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention.core import visibility
from attention.core.relative import Relative
from attention.sliding_window.near import Arrays, Limits

Windowed = Callable[
  [Float[Array, "B T N H"], Arrays, Relative, Limits], Float[Array, "B T N V"]
]
"""The type of `near.windowed_attention` once its options are set."""


class Rules(NamedTuple):
  """The limits of a call other than the window, by position.

  Attributes:
    key_mask: False hides a key.
    query_segments: segment ids; a query sees keys of its own segment only.
    key_segments: segment ids of the keys.
    of_globals: which global keys a query sees.
  """

  key_mask: Bool[Array, "B S"] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None
  of_globals: Bool[Array, "B T G"]


def by_dilation(
  windowed: Windowed,
  dilations: tuple[int, ...],
  query: Float[Array, "B T N H"],
  arrays: Arrays,
  tables: Relative,
  rules: Rules,
  rng: Array | None,
) -> Float[Array, "B T N V"]:
  """Runs the heads of each dilation, in one call where all have the same."""
  calls = _head_groups(dilations, arrays.key.shape[2])
  if len(calls) == 1:
    return _dilated(windowed, dilations[0], query, arrays, tables, rules, rng)
  outs, order = [], []
  for i, (dilation, query_heads, key_heads) in enumerate(calls):
    mine, theirs = np.array(query_heads), np.array(key_heads)
    outs.append(
      _dilated(
        windowed,
        dilation,
        query[:, :, mine],
        Arrays(*(x[:, :, theirs] for x in arrays[:4])),
        tables.of_heads(mine),
        rules,
        # Every call numbers its tiles from 0, so each needs its own key.
        None if rng is None else jax.random.fold_in(rng, i),
      )
    )
    order += query_heads
  return jnp.concatenate(outs, axis=2)[:, :, np.argsort(order)]


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


def _dilated(
  windowed: Windowed,
  dilation: int,
  query: Float[Array, "B T N H"],
  arrays: Arrays,
  tables: Relative,
  rules: Rules,
  rng: Array | None,
) -> Float[Array, "B T N V"]:
  """Attention with one dilation for all heads."""

  def of_class(query, key, value, rules, rng):
    near = visibility.keys(rules.key_mask) & visibility.segments(
      rules.query_segments, rules.key_segments
    )
    mine = arrays._replace(key=key, value=value)
    return windowed(query, mine, tables, Limits(near, rules.of_globals, rng))

  length, source_length = query.shape[1], arrays.key.shape[1]
  # With a step longer than the sequence, a query sees its own position only.
  dilation = min(dilation, max(length, source_length))
  if dilation == 1:
    return of_class(query, arrays.key, arrays.value, rules, rng)
  if rules.key_mask is None and source_length % dilation:
    # The keys that pad the shorter classes must be hidden.
    everyone = jnp.ones((query.shape[0], source_length), bool)
    rules = rules._replace(key_mask=everyone)

  def split(x):
    """[B, T, …] -> [B, ceil(T/d), d, …]."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % dilation)
    x = jnp.pad(x, pad)
    steps = x.shape[1] // dilation
    return x.reshape(x.shape[0], steps, dilation, *x.shape[2:])

  out = jax.vmap(of_class, (2, 2, 2, 2, 0), 2)(
    split(query),
    split(arrays.key),
    split(arrays.value),
    jax.tree.map(split, rules),
    None if rng is None else jax.random.split(rng, dilation),
  )
  return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length]
