"""Log-linear attention: gated linear attention with a state for each level of a tree.

With positions counted from 0, the level of a pair (t, s), s ≤ t, is the number of
binary digits of t xor s: 1 + b where b is the highest digit in which they differ.

After n positions, position s is stored at the level of (n, s). When n grows to m, level
l becomes max(l, level of (m, n)), and a query t reads level l with the scale of max(l,
level of (t, n)). So a chunk may start at any position, and examples may differ in it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.gated_linear import mamba2, with_step_and_skip
from attention.mechanism import Attention
from attention.platform import layout, programs
from attention.recurrent import gates, packing
from attention.recurrent.arrays import (
  chunks,
  prepare_arrays,
  repeat_heads,
  unchunk,
)
from attention.recurrent.scan import (
  Resets,
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  device_prefix,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import decay_to_end, pair_decays


class LevelState(NamedTuple):
  """The states of levels 1, 2, … in float32, and the number of positions so far."""

  sums: Float[Array, "B N L-1 H V"]
  count: Int[Array, "B"]


@attention_function
def log_linear_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N"],
  level_scales: Float[Array, "B T N L"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: LevelState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LevelState]:
  """Gated linear attention that weights the past by level, with one state per level.

    out = log_linear_attention(q, k, v, log_decay=g, level_scales=scales)

    out_t = scale · Σ_l scales_tl (S_t^l)ᵀ q_t
    S_t^l = Σ e^(Σ g_u over s < u ≤ t) k_s v_sᵀ over the s at level l of t

  for each head. Level 0 is t itself, with t counted from 0. The positions before t are
  split into buckets, one for each binary digit of t that is 1. The bucket of digit b
  has 2^b positions, at level 1 + b; that of the lowest digit is nearest to t. If all
  scales are 1, the output is that of `gated_linear_attention`. All computation is in
  float32.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    log_decay: g, at most 0.
    level_scales: the scale of each level; T positions have ⌈log₂ T⌉ + 1 levels.
    mask: key mask `[B, 1, 1, T]`. Masked positions do not change the state, are not
      counted, and output zeros, so padding anywhere never affects the output.
    initial_state: the state before the first segment; None means the empty state. If it
      and the call together have more than 2^(L−1) positions, the last level contains
      all older ones.
    segment_ids: `[B, T]`; where they change, the state and the count restart.
    num_segments: G; both fields of a `LevelState` then have an axis of size G after B.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    return_state: whether to return the last state as well.

  Results: as in `gated_linear_attention`; the state is a `LevelState`.

  Raises:
    ValueError: as in `gated_linear_attention`; or L is 1, or too small for T.

  Cost, with C = `scan.CHUNK`: time T·N·(C·(H+V+L) + L·H·V), memory
  B·T·N·(H+V+L), with gradients also L states for each chunk. Without an initial state,
  L is at most ⌈log₂ T⌉ + 1 in these terms.

  Paper: Log-linear attention, arXiv:2506.04761.
  """
  return _recurrence(**locals())


def _recurrence(
  query,
  key,
  value,
  *,
  level_scales,
  initial_state,
  num_segments=None,
  **options,
):
  """`log_linear_attention`, for sequence-sharded inputs as well."""
  scale, axis_name = options.pop("scale"), options.get("axis_name")
  return_state = options.pop("return_state", True)
  query = repeat_heads(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  is_sharded, levels = is_sequence_sharded(axis_name), level_scales.shape[3]
  total = length * (jax.lax.axis_size(axis_name) if is_sharded else 1)
  min_levels = max(2, (total - 1).bit_length() + 1)
  if levels < min_levels:
    raise ValueError(
      f"level_scales: expected [B, T, N, L] with L of at least {min_levels} for "
      f"{total} positions, got L = {levels}"
    )
  keep = checks.key_mask(options["mask"], query, query, "")
  segments: Any = options.get("segment_ids")
  keep = jnp.ones((batch, length), bool) if keep is None else keep
  packed = None
  if num_segments is not None:
    packed = packing.make_packing(query, num_segments, options)
    keep &= (segments >= 0) & (segments < num_segments)
  (key, value, scales), log_decay, starts = prepare_arrays(
    query, (key, value, level_scales), **options
  )
  lead = (batch,) if packed is None else (batch, num_segments)
  shape = *lead, num_heads, levels - 1, head_dim, value.shape[3]
  is_empty = initial_state is None and not is_sharded
  # Without an initial state, the levels above those of T positions stay empty.
  num_used = min(levels - 1, length.bit_length()) if is_empty else levels - 1
  if initial_state is None:
    sums = jnp.zeros_like(value, shape=(*shape[:-3], num_used, *shape[-2:]))
    count = jnp.zeros_like(keep, jnp.int32, shape=lead)
  elif not isinstance(initial_state, LevelState):
    raise ValueError(
      f"initial_state: expected a LevelState, got {programs.type_name(initial_state)}"
    )
  else:
    sums, count = initial_state
    expected, got = (shape, lead), (sums.shape, count.shape)
    if got != expected:
      axes = "B" if packed is None else "B, G"
      raise ValueError(
        f"initial_state: expected shapes [{axes}, N, L-1, H, V] and [{axes}] = "
        f"{expected}, got {got}"
      )
    count = count.astype(jnp.int32)
  dtype = query.dtype
  query = query.astype(jnp.float32) * checks.softmax_scale(scale, head_dim)
  inputs = query, key, value, log_decay, scales[..., : num_used + 1]
  missing = levels - 1 - num_used
  if packed is not None:
    out, last = _attend_segments(packed, keep, inputs, sums, count, segments)
    last = last._replace(sums=_pad_levels(last.sums, missing))
    return (out.astype(dtype), last) if return_state else out.astype(dtype)
  positions, ends = packing.visible_positions(keep, starts, count, axis_name)
  attend = functools.partial(_attend, positions, ends, inputs)
  sums, last = sums.astype(jnp.float32), ends[:, -1]
  if is_sequence_sharded(axis_name):
    factor = jnp.exp(jnp.sum(log_decay, axis=1))[..., None, None, None]
    after, _ = attend(sums)
    own = factor, after[:, :, :, None], last.reshape(-1, *[1] * 5)
    first = jax.tree.map(jnp.zeros_like, own)
    sums = device_prefix(_join, first, own, axis_name)[1][:, :, :, 0]
  sums, out = attend(sums, is_empty=is_empty)
  out, sums = out[:, :length].astype(dtype), _pad_levels(sums, missing)
  return (out, LevelState(sums, last)) if return_state else out


def _pad_levels(sums, missing):
  """Appends `missing` empty levels to the sums."""
  axis = sums.ndim - 3
  return jnp.pad(
    sums, [(0, missing if i == axis else 0) for i in range(sums.ndim)]
  )


def _attend_segments(packed, keep, inputs, sums, count, segment_ids):
  """The results, and the final state of each segment."""
  positions = packed.offset + layout.rows_at(count, segment_ids)
  ends = positions + keep
  empty = jnp.zeros_like(sums[:, 0], jnp.float32)

  def attend(inputs, resets):
    positions, ends, *inputs = inputs
    # A chunk ends at its last position.
    ends = ends.reshape(ends.shape[0], -1, packed.size)
    ends = jnp.repeat(jnp.max(ends, axis=2), packed.size, axis=1)
    options = {"resets": resets, "size": packed.size}
    return _attend(positions, ends, inputs, empty, **options)[1]

  inputs = positions, ends, *inputs
  out, sums = packed.run(attend, inputs, sums.astype(jnp.float32))
  add = jax.vmap(lambda count, ids, keep: count.at[ids].add(keep))
  count = add(count, segment_ids, keep.astype(jnp.int32))
  return out, LevelState(sums, count)


def _attend(
  positions, ends, inputs, sums, *, is_empty=False, resets=None, size=None
):
  """The scan over chunks; `inputs` are float32, 0 at masked positions."""
  query, _, value, _, scales = inputs
  length, width = query.shape[1], scales.shape[3] * query.shape[3]
  size = size or chunk_size(length)
  count = chunks_per_step(query, size, 2 * (size + width) + value.shape[3])
  size *= count
  # A chunk ends at its last position, even if padding follows.
  ends = jnp.pad(ends, [(0, 0), (0, -length % size)], mode="edge")
  step = functools.partial(_step, count)
  inputs = (
    ends,
    positions,
    *inputs,
    resets and packing.pad_to_steps(resets, count),
  )
  return scan(step, (), sums, inputs, size=size, is_empty=is_empty)


def _step(count, params, sums, inputs):
  """`count` = G consecutive chunks, `[B, N, G, C, ·]`."""
  del params
  ends, positions, *arrays, resets = inputs
  ends, positions = (
    x.reshape(x.shape[0], 1, count, -1) for x in (ends, positions)
  )
  query, key, value, log_decay, scales = chunks(arrays, count)
  max_level = scales.shape[-1] - 1
  level = functools.partial(_level, max_level)

  def weights(spec, level):
    """The scale of each query at the given level of each query or pair."""
    is_level = jax.nn.one_hot(level[:, 0], max_level + 1, dtype=scales.dtype)
    return jnp.einsum(spec, scales, is_level)

  pairs = level(positions[..., :, None], positions[..., None, :])
  scores = jnp.einsum("...ch,...sh->...cs", query, key)
  scores *= jnp.tril(pair_decays(log_decay))
  scores *= weights("bngcl,bgcsl->bngcs", pairs)
  out = scores @ value
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=3))
  is_level = jax.nn.one_hot(
    level(ends[..., -1:], positions), max_level + 1, dtype=scales.dtype
  )
  level_keys = key * jnp.exp(decay_to_end(log_decay))
  level_keys = level_keys[..., None, :] * is_level[..., 1:, None]
  own = (
    from_start[:, :, None, :, -1:],
    jnp.einsum("bngclh,bngcv->bnlghv", level_keys, value),
    ends[:, :, None, :, -1:, None],
  )
  last = jax.tree.map(lambda x: x[:, :, :, -1:], own)
  if sums is not None:
    first = jnp.zeros_like(own[0][:, :, :, :1]), sums[:, :, :, None]
    first = *first, positions[:, :, None, :1, :1, None]
    if resets is not None:
      opens, states = resets
      chunk_starts = positions[:, :, None, :, :1, None]
      states = jnp.zeros_like(own[0]), jnp.moveaxis(states, 1, 3), chunk_starts
      before = chunk_prefixes(_join, first, own, Resets(opens, states))
      last = _join(before, own)
    else:
      before = chunk_prefixes(_join, first, own)
      last = _join(jax.tree.map(lambda x: x[:, :, :, -1:], before), last)
    start_level = level(positions, positions[..., :1])
    levels = jnp.arange(1, max_level + 1).reshape(1, 1, 1, 1, -1)
    merged = weights("bngcl,bgcl->bngc", start_level)[..., None]
    is_above = levels > start_level[..., None]
    level_scales = jnp.where(is_above, scales[..., 1:], merged)
    queries = (query * from_start)[..., None, :] * level_scales[..., None]
    out += jnp.einsum("bngclh,bnlghv->bngcv", queries, before[1])
  out = unchunk(out)
  if resets is not None:
    out = out, jnp.moveaxis(last[1], 3, 1)
  return last[1][:, :, :, -1], out


def _level(max_level, first, second):
  """The level of pairs of positions, at most `max_level`."""
  return jnp.minimum(32 - jax.lax.clz(first ^ second), max_level)


def _join(earlier, later):
  """Joins (decay, sums `[B, N, L-1, G, H, V]`, final count) of consecutive ranges."""
  max_level = later[1].shape[2]
  levels = jnp.arange(1, max_level + 1).reshape(1, 1, -1, 1, 1, 1)
  merged = _level(max_level, later[2], earlier[2])
  total = jnp.sum(earlier[1], 2, keepdims=True, where=levels <= merged)
  sums = jnp.where(levels == merged, total, 0.0)
  sums = jnp.where(levels > merged, earlier[1], sums)
  return later[0] * earlier[0], later[0] * sums + later[1], later[2]


@attention_factory
def log_linear(num_levels: int = 16) -> Attention:
  """Log-linear Mamba-2: `mamba2` with level scales computed from the inputs.

    scales_t = softplus(a ∘ (x_t · W))

  Args:
    num_levels: L, an int of at least 2, for up to 2^(L−1) positions.

  Returns:
    An `Attention` like that of `mamba2`, whose cache is N·(L−1)·H² numbers and a count
    per example. It also has the parameters `level_kernel [F, N, L]` (W) and
    `level_gain [N, L]` (a, initially 1).

  Paper: arXiv:2506.04761, section 3.
  """
  checks.check_at_least("num_levels", num_levels, 2)

  def init(key, dims):
    base, levels = jax.random.split(key)
    shape = dims.num_heads, num_levels
    return {
      **mamba2().init(base, dims)["params"],
      "level_kernel": gates.kernel(levels, dims.features, *shape),
      "level_gain": jnp.ones(shape),
    }

  def level_scales(params, inputs):
    x = gates.project(inputs, params["level_kernel"])
    return jax.nn.softplus(params["level_gain"][None, None] * x)

  def init_state(batch, dims):
    shape = batch, dims.num_heads, num_levels - 1, dims.head_dim, dims.values
    sums = jnp.zeros(shape, jnp.float32)
    return LevelState(sums, jnp.zeros(batch, jnp.int32))

  gate_fns = {"log_decay": gates.step_decay, "beta": gates.step}
  return gates.recurrent_mechanism(
    "log_linear",
    with_step_and_skip(_recurrence),
    init=init,
    gates={**gate_fns, "level_scales": level_scales},
    arrays={"level_scales": Float[Array, "B T N L"]},
    init_state=init_state,
  )
