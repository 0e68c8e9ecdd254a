"""Dilated windows of `sliding_window_attention`, one dilation per query head.

A dilated window needs no code of its own. The positions of one residue class r,
t = i·d + r, see keys of the same class only, and there the window is an
ordinary one over i. [B, T, N, H] read as [B, T/d, d·N, H] makes the classes
part of the heads, which moves no data; where d does not divide T the shorter
classes are filled up with keys that nobody sees.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from attention.sliding_window_blocks import (
  Geometry,
  Limits,
  Operands,
  windowed_attention,
)
from attention.sliding_window_global import Rules


def by_dilation(
  geometry: Geometry,
  dilations: tuple[int, ...],
  operands: Operands,
  rules: Rules,
  global_mask: Bool[Array, "B T G"],
  dropout_rng: Array | None,
) -> Float[Array, "B T N V"]:
  """Runs the heads of every dilation; one call where all have the same."""
  calls = _head_groups(dilations, operands.key.shape[2])
  if len(calls) == 1:
    return _dilated(
      geometry, dilations[0], operands, rules, global_mask, dropout_rng
    )
  outs, order = [], []
  for i, (dilation, query_heads, key_heads) in enumerate(calls):
    heads = np.array(query_heads)
    bias = operands.relative.bias
    theirs = np.array(key_heads)
    mine = Operands(
      query=operands.query[:, :, heads],
      key=operands.key[:, :, theirs],
      value=operands.value[:, :, theirs],
      global_key=operands.global_key[:, :, theirs],
      global_value=operands.global_value[:, :, theirs],
      relative=operands.relative._replace(
        bias=None if bias is None else bias[heads]
      ),
    )
    # Calls number their blocks alike: each needs a key of its own.
    rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, i)
    outs.append(_dilated(geometry, dilation, mine, rules, global_mask, rng))
    order += query_heads
  return jnp.concatenate(outs, axis=2)[:, :, np.argsort(order)]


def _head_groups(
  dilations: tuple[int, ...], num_kv_heads: int
) -> list[tuple[int, list[int], list[int]]]:
  """Heads that one call can serve: (dilation, query heads, key heads).

  In a call every key head has equally many query heads, as the block loop
  wants it. A key head whose query heads differ is in several calls.
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
  geometry: Geometry,
  dilation: int,
  operands: Operands,
  rules: Rules,
  global_mask: Bool[Array, "B T G"],
  dropout_rng: Array | None,
) -> Float[Array, "B T N V"]:
  """One dilation for all heads: the residue classes become heads."""
  batch, length, num_heads, _ = operands.query.shape
  source_length = operands.key.shape[1]
  # A step beyond the sequence leaves each query its own position only.
  dilation = min(dilation, max(length, source_length))
  key_mask = rules.key_mask
  if key_mask is None and source_length % dilation:
    # The shorter classes are filled up with keys that nobody may see.
    key_mask = jnp.ones((batch, source_length), bool)

  def split(x):
    """[B, T, …] -> [B, ceil(T/d), d, …]."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % dilation)
    x = jnp.pad(x, pad)
    steps = x.shape[1] // dilation
    return x.reshape(batch, steps, dilation, *x.shape[2:])

  def into_heads(x):
    """[B, T, N, H] -> [B, ceil(T/d), d·N, H]."""
    if dilation == 1:
      return x
    x = split(x)
    return x.reshape(*x.shape[:2], dilation * x.shape[3], x.shape[4])

  def for_all(x, axis=2):
    repeats = [1] * x.ndim
    repeats[axis] = dilation
    return jnp.tile(x, repeats)

  bias = operands.relative.bias

  out = windowed_attention(
    # A window beyond the sequence is no wider than the sequence.
    geometry._replace(
      left=min(geometry.left, length), right=min(geometry.right, source_length)
    ),
    Operands(
      query=into_heads(operands.query),
      key=into_heads(operands.key),
      value=into_heads(operands.value),
      global_key=for_all(operands.global_key),
      global_value=for_all(operands.global_value),
      relative=operands.relative._replace(
        bias=None if bias is None else for_all(bias, axis=0)
      ),
    ),
    Limits(
      key_mask=None if key_mask is None else split(key_mask),
      query_segments=None
      if rules.query_segments is None
      else split(rules.query_segments),
      key_segments=None
      if rules.key_segments is None
      else split(rules.key_segments),
      global_mask=split(global_mask),
      dropout_rng=dropout_rng,
    ),
  )
  out = out.reshape(batch, -1, num_heads, out.shape[-1])
  return out[:, :length]
