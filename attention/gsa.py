"""Gated slot attention: softmax attention to slots, which are decaying sums.

The state has the keys and the values of the slots in one array: it is the state of
gated linear attention with the slot weights as keys and [k, v] as values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates, packing, recurrence
from attention.recurrent.arrays import (
  chunks,
  prepare_arrays,
  repeat_heads,
  unchunk,
)
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import (
  LOG_ZERO,
  decay_to_end,
  decayed_sums,
  pairs,
  running_sum,
)


@attention_function
def gsa_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N M"],
  slot_weights: Float[Array, "B T N M"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N M X"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N M X"]]
):
  """Softmax attention to M slots, which are decaying sums of keys and values.

    out = gsa_attention(q, k, v, log_decay=g, slot_weights=s)

    K_t = diag(e^g_t) K_{t−1} + s_t k_tᵀ        V_t = diag(e^g_t) V_{t−1} + s_t v_tᵀ
    out_t = V_tᵀ softmax(scale · K_t q_t)

  for each head. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    log_decay: g of each slot, at most 0.
    slot_weights: s, the weight of a position in each slot; 1 − e^g in the paper.
    initial_state: [K, V] before the first position, X = H+V; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is
  `[B, N, M, H+V]`, or with `num_segments` `[B, G, N, M, H+V]`.

  Cost, with C = `scan.CHUNK`: time T·N·(C·(H+2M+V) + M·(H+V)) and 4·T·N·M·log₂ C
  exponentials; memory B·T·N·(H+M+V), with gradients also one state for each chunk.

  Paper: Gated slot attention for efficient linear-time sequence modeling,
  arXiv:2409.07146, section 3.
  """
  return _recurrence(**locals())


def _recurrence(
  query,
  key,
  value,
  *,
  log_decay,
  slot_weights,
  mask,
  is_causal,
  scale,
  initial_state,
  segment_ids,
  num_segments=None,
  return_state=True,
  axis_name=None,
) -> Any:
  """`gsa_attention`, for sequence-sharded inputs as well."""
  query = repeat_heads(query, key, value)
  num_heads, head_dim = query.shape[2:]
  options = {"mask": mask, "is_causal": is_causal, "axis_name": axis_name}
  options["segment_ids"], packed = segment_ids, None
  if num_segments is not None:
    packed = packing.make_packing(query, num_segments, options)
  arrays = key, value, log_decay, slot_weights
  arrays, _, starts = prepare_arrays(query, arrays, log_decay=None, **options)
  key, value, log_decay, slots = arrays
  if starts is not None:
    log_decay = jnp.where(starts, LOG_ZERO, log_decay)
  value = jnp.concatenate([key, value], axis=3)
  shape = num_heads, slots.shape[3], value.shape[3]
  state = packing.first_state(
    initial_state, value, shape, "N, M, H+V", num_segments
  )
  is_sharded = is_sequence_sharded(axis_name)
  if is_sharded:
    state = recurrence.state_before(slots, value, log_decay, axis_name)
  dtype = query.dtype
  query = query.astype(jnp.float32) * checks.softmax_scale(scale, head_dim)
  size = chunk_size(query.shape[1]) if packed is None else packed.size
  numbers = 2 * size + 3 * shape[1] + head_dim + shape[2]

  def attend(inputs, state, resets=None):
    count = chunks_per_step(inputs[0], size, numbers)
    # Two arrays, because a CPU would copy slices of one at each position.
    state, out = scan(
      functools.partial(_step, count),
      (),
      tuple(jnp.split(state, [head_dim], axis=-1)),
      (*inputs, resets and packing.pad_to_steps(resets, count)),
      size=size * count,
      is_empty=initial_state is None and not is_sharded and resets is None,
      position=_position if resets is None else None,
    )
    return jnp.concatenate(state, axis=-1), out

  inputs = query, slots, value, log_decay
  out, state = packing.results(attend, packed, inputs, state)
  out = out.astype(dtype)
  return (out, state) if return_state else out


def _position(params, state, inputs):
  """One position `[B, N, ·]`, by the paper's equations."""
  del params
  query, slots, key_value, log_decay, _ = inputs
  decay = jnp.exp(log_decay)[..., None]
  new_key_value = jnp.split(key_value[..., None, :], [query.shape[-1]], axis=-1)
  keys, values = (
    decay * x + slots[..., None] * new
    for x, new in zip(state, new_key_value, strict=True)
  )
  weights = jax.nn.softmax(jnp.einsum("bnmh,bnh->bnm", keys, query))
  return (keys, values), jnp.einsum("bnm,bnmv->bnv", weights, values)


def _step(count, params, state, inputs):
  """`count` consecutive chunks, `[B, N, count, C, ·]`."""
  del params
  *arrays, resets = inputs
  query, slots, key_value, log_decay = chunks(arrays, count)
  head_dim = query.shape[-1]
  key, value = key_value[..., :head_dim], key_value[..., head_dim:]
  from_start = jnp.exp(running_sum(log_decay))
  to_end = jnp.exp(decay_to_end(log_decay))
  after, before = jnp.swapaxes(slots * to_end, -2, -1) @ key_value, None
  if state is not None:
    factor = jnp.swapaxes(from_start[..., -1:, :], -2, -1)
    state = jnp.concatenate(state, axis=-1)[:, :, None]
    first = jnp.zeros_like(factor[:, :, :1]), state
    resets = packing.head_resets(resets, factor)
    own = factor, after
    _, before = chunk_prefixes(recurrence.join_states, first, own, resets)
    after += factor * before
  scores = jnp.einsum("...qh,...sh->...qs", query, key)
  logits = decayed_sums(scores, slots, log_decay)
  if before is not None:
    state_logits = jnp.einsum(
      "...qh,...mh->...qm", query, before[..., :head_dim]
    )
    logits += from_start * state_logits
  weights = jax.nn.softmax(logits)
  [[scores]] = pairs([weights], [slots], log_decay)
  out = jnp.tril(scores) @ value
  if before is not None:
    out += (weights * from_start) @ before[..., head_dim:]
  out = unchunk(out)
  if resets is not None:
    out = packing.with_states(out, after)
  return tuple(jnp.split(after[:, :, -1], [head_dim], axis=-1)), out


@attention_factory
def gsa(num_slots: int = 64, temperature: float = 8.0) -> Attention:
  """Gated slot attention, with slot weights that are 1 minus the forget gates.

    g_t = log sigmoid(x_t · W) / τ        s_t = 1 − e^g_t

  The scale defaults to 1.

  Args:
    num_slots: M.
    temperature: τ; larger values bring the decays closer to 1.

  Returns:
    A causal `Attention` with `gates`, whose cache is N·M·2H numbers for each
    example. Its parameter is `gate_kernel [F, N, M]`.

  Raises:
    ValueError: `num_slots` is not a positive int, or `temperature` is not above 0.

  The paper's model also has `projection_activation='silu'` and
  `output_norm='rms_joint'`. The paper applies SiLU to the results before that norm.
  Paper: arXiv:2409.07146, section 3.
  """
  if not temperature > 0.0:
    raise ValueError(
      f"temperature: expected a number above 0, got {temperature!r}"
    )

  def init(key, dims):
    shape = dims.features, dims.num_heads, num_slots
    return {"gate_kernel": gates.kernel(key, *shape)}

  def log_decay(params, inputs):
    x = gates.project(inputs, params["gate_kernel"])
    return jax.nn.log_sigmoid(x) / temperature

  def attend_slots(params, query, key, value, *, log_decay, scale, **options):
    del params
    options |= {"log_decay": log_decay, "slot_weights": -jnp.expm1(log_decay)}
    scale = 1.0 if scale is None else scale
    return _recurrence(query, key, value, scale=scale, **options)

  def init_state(batch, dims):
    width = dims.head_dim + dims.values
    return jnp.zeros((batch, dims.num_heads, num_slots, width), jnp.float32)

  return gates.recurrent_mechanism(
    "gsa",
    attend_slots,
    init=init,
    gates={"log_decay": log_decay},
    arrays={
      "log_decay": Float[Array, "B T N M"],
      "initial_state": Float[Array, "B N M X"],
    },
    init_state=init_state,
  )
