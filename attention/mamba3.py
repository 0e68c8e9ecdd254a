"""Mamba-3: trapezoidal discretisation, and rotations of keys and queries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.decorators import attention_factory
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.arrays import segment_starts
from attention.recurrent.kernels import Implementation
from attention.recurrent.recurrence import recurrent_attention
from attention.recurrent.scan import device_prefix, is_sequence_sharded
from attention.softmax import sharding


class Mamba3State(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    state: S.
    angle: the cumulative rotation angle, modulo 2π.
    key: the rotated key of the last position.
    value: the value of the last position.
  """

  state: Float[Array, "B N H V"]
  angle: Float[Array, "B N P"]
  key: Float[Array, "B N H"]
  value: Float[Array, "B N V"]


@attention_factory
def mamba3(
  rotary_fraction: float = 0.5, implementation: Implementation | None = None
) -> Attention:
  """Mamba-3's mixer with one input and one output (SISO).

    Δ_t = softplus(x_t · W_Δ + b_Δ)        α_t = exp(−Δ_t max(softplus(x_t · W_A), 10⁻⁴))
    λ_t = sigmoid(x_t · W_λ)               φ_t = φ_{t−1} + π Δ_t tanh(x_t · W_φ)
    k'_t = R(φ_t) (k_t + b_k)              q'_t = R(φ_t) (q_t + b_q)
    S_t = α_t S_{t−1} + (1 − λ_t) Δ_t α_t k'_{t−1} v_{t−1}ᵀ + λ_t Δ_t k'_t v_tᵀ
    out_t = S_tᵀ q'_t + D v_t

  where R rotates neighbouring pairs of the first 2P channels. The two updates
  discretise an integral by the trapezoidal rule; with λ = 1 it is Mamba-2. The
  rotations are the imaginary part of a complex decay; Rᵀ in place of R is equivalent to
  −W_φ. The paper's B, C and x are k, q and v. The scale defaults to 1.

  Args:
    rotary_fraction: 2P / H, above 0 and at most 1.
    implementation: as in `gated_linear`.

  Returns:
    A causal `Attention` with `gates`, whose cache is a `Mamba3State`. Its
    parameters are `step_kernel`, `decay_kernel`, `trapezoid_kernel`, each `[F, N]`,
    `angle_kernel [F, P]`, `step_bias`, `skip` (D), each `[N]`, `query_bias` and
    `key_bias`, each `[N, H]`.

  Raises:
    ValueError: `rotary_fraction` is out of range; by `init`, it rotates no pair.

  Cost: that of `gated_linear_attention` with decays for each head, because the two
  updates with k'_{t−1} v_{t−1}ᵀ are merged into one before the decay of t:

    U_t = α_{t−1} U_{t−1} + (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t) k'_{t−1} v_{t−1}ᵀ
    S_t = α_t U_t + λ_t Δ_t k'_t v_tᵀ

  The paper's model also has `query_key_norm='rms'`, `num_qk_heads=1`,
  `output_gate='silu'` and no `short_convolution`. Here t − 1 is the last unmasked
  position before t; the first position of a segment has none. Unlike the paper, it has
  no form with several inputs and outputs (MIMO). Paper: Mamba-3: improved sequence
  modeling using state space principles, arXiv:2603.15569.
  """
  if not 0.0 < rotary_fraction <= 1.0:
    raise ValueError(
      f"rotary_fraction: expected above 0 and at most 1, got {rotary_fraction!r}"
    )

  def num_angles(dims):
    return int(dims.head_dim * rotary_fraction) // 2

  def init(key, dims):
    if num_angles(dims) < 1:
      raise ValueError(
        "rotary_fraction: expected at least one pair of the head dimension "
        f"{dims.head_dim}, got {rotary_fraction!r}"
      )
    decay, trapezoid, angle, *steps = jax.random.split(key, 6)
    features, heads = dims.features, dims.num_heads
    params = gates.step_params(steps, dims)
    params.pop("log_rate")
    return {
      **params,
      "decay_kernel": gates.kernel(decay, features, heads),
      "trapezoid_kernel": gates.kernel(trapezoid, features, heads),
      "angle_kernel": gates.kernel(angle, features, num_angles(dims)),
      "query_bias": jnp.ones((heads, dims.head_dim)),
      "key_bias": jnp.ones((heads, dims.head_dim)),
      "skip": jnp.ones(heads),
    }

  def init_state(batch, dims):
    heads, size = (batch, dims.num_heads), dims.head_dim
    shapes = (size, dims.values), (num_angles(dims),), (size,), (dims.values,)
    return Mamba3State(
      *(jnp.zeros((*heads, *shape), jnp.float32) for shape in shapes)
    )

  def log_decay(params, inputs):
    rate = jax.nn.softplus(gates.project(inputs, params["decay_kernel"]))
    return -jnp.maximum(rate, 1e-4) * gates.step(params, inputs)

  def trapezoid(params, inputs):
    return jax.nn.sigmoid(gates.project(inputs, params["trapezoid_kernel"]))

  def turn(params, inputs):
    angles = jnp.tanh(gates.project(inputs, params["angle_kernel"]))
    return jnp.pi * angles[:, :, None] * gates.step(params, inputs)[..., None]

  return gates.recurrent_mechanism(
    "mamba3",
    _recurrence,
    implementation=implementation,
    init=init,
    init_state=init_state,
    gates={
      "log_decay": log_decay,
      "step": gates.step,
      "trapezoid": trapezoid,
      "turn": turn,
    },
    arrays={
      **dict.fromkeys(("step", "trapezoid"), Float[Array, "B T N"]),
      "turn": Float[Array, "B T N P"],
    },
  )


def _recurrence(
  params,
  query,
  key,
  value,
  *,
  log_decay,
  step,
  trapezoid,
  turn,
  mask,
  scale,
  segment_ids,
  initial_state,
  axis_name,
  **options,
):
  dtype = query.dtype
  key, value = (x.astype(jnp.float32) for x in (key, value))
  angle = _cumulative_angles(turn)
  if initial_state is not None:
    angle = _add_angles(initial_state.angle[:, None], angle)
  elif is_sequence_sharded(axis_name):
    own = angle[:, -1:]
    first = device_prefix(_add_angles, jnp.zeros_like(own), own, axis_name)
    angle = _add_angles(first, angle)
  query = _rotate(query + params["query_bias"][None, None], angle)
  query *= 1.0 if scale is None else scale
  key = _rotate(key + params["key_bias"][None, None], angle)
  last = None
  if initial_state is not None:
    last = initial_state.key, initial_state.value
  previous, last = _previous_rows(
    (key, value), last, mask, segment_ids, axis_name
  )
  decay, end = jnp.exp(log_decay)[..., None], (trapezoid * step)[..., None]
  previous_end, previous_decay = (
    sharding.exchange_halo(x, 1, 0, axis_name)[:, :-1] for x in (end, log_decay)
  )
  weight = previous_end + (1.0 - trapezoid)[..., None] * step[..., None]
  qkv = decay * query, previous[0], weight * previous[1]
  out, state = recurrent_attention(
    *(x.astype(dtype) for x in qkv),
    log_decay=previous_decay,
    scale=1.0,
    segment_ids=segment_ids,
    initial_state=None if initial_state is None else initial_state.state,
    axis_name=axis_name,
    **options,
  )
  own = end * jnp.sum(query * key, axis=-1, keepdims=True)
  out += (own + params["skip"][None, None, :, None]) * value
  update = (end * key)[:, -1, :, :, None] * value[:, -1, :, None, :]
  state = decay[:, -1, :, :, None] * state + update
  return out, Mamba3State(state, angle[:, -1], *last)


@jax.custom_jvp
def _cumulative_angles(
  turn: Float[Array, "B T N P"],
) -> Float[Array, "B T N P"]:
  """Cumulative sums modulo 2π, without loss of precision at any length.

  The sums are of integers; 2³², a full turn, overflows to 0.
  """
  turns = turn / (2.0 * jnp.pi)
  steps = jnp.round((turns - jnp.round(turns)) * 2.0**32).astype(jnp.int32)
  total = jnp.cumsum(steps, axis=1, dtype=jnp.int32)
  return total.astype(turn.dtype) * (2.0 * jnp.pi / 2.0**32)


@_cumulative_angles.defjvp
def _cumulative_angles_jvp(primals, tangents):
  return _cumulative_angles(*primals), jnp.cumsum(tangents[0], axis=1)


def _add_angles(first, second):
  """The sum of two angles modulo 2π."""
  return jnp.remainder(first + second, 2.0 * jnp.pi)


def _rotate(
  x: Float[Array, "B T N H"], angle: Float[Array, "B T N P"]
) -> Float[Array, "B T N H"]:
  """Rotates the first P pairs of neighbouring features of `x`."""
  size = 2 * angle.shape[-1]
  pairs = x[..., :size].reshape(*angle.shape, 2)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first = pairs[..., 0] * cos - pairs[..., 1] * sin
  second = pairs[..., 0] * sin + pairs[..., 1] * cos
  rotated = jnp.stack([first, second], axis=-1).reshape(*x.shape[:-1], size)
  return jnp.concatenate([rotated, x[..., size:]], axis=-1)


def _previous_rows(rows, last, mask, segment_ids, axis_name):
  """The rows at the last unmasked position before each position, and the last row.

  Args:
    rows: arrays `[B, T, N, D]`.
    last: the rows before the first position, `[B, N, D]`; None means 0.
    mask: `[B, 1, 1, T]`, True = unmasked, or None.
    segment_ids: `[B, T]` or None; the rows before the first position of a segment are
      0.
    axis_name: the mesh axis of a sequence-sharded call, or None.
  """
  if last is None:
    last = jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), rows)
  if (
    mask is None and segment_ids is None and not is_sequence_sharded(axis_name)
  ):
    before = jax.tree.map(
      lambda y, x: jnp.concatenate([y[:, None], x[:, :-1]], axis=1), last, rows
    )
    return before, [x[:, -1] for x in rows]
  shape = rows[0].shape[:2]
  keep = jnp.ones(shape, bool) if mask is None else mask[:, 0, 0]
  is_start = jnp.zeros(shape, bool)
  if segment_ids is not None:
    is_start = segment_starts(segment_ids, axis_name)
  positions = jnp.arange(1, shape[1] + 1)[None]
  places, starts = (
    jax.lax.cummax(jnp.where(x, positions, 0), axis=1) for x in (keep, is_start)
  )
  places = jnp.pad(places, ((0, 0), (1, 0)))[:, :, None, None]
  starts = jnp.pad(starts, ((0, 0), (0, 1)), "edge")[:, :, None, None]

  def take(last, x):
    x = jnp.concatenate([last[:, None], x], axis=1)
    x = jnp.take_along_axis(x, places, axis=1)
    return jnp.where(places >= starts, x, 0.0)

  if is_sequence_sharded(axis_name):
    has_row = jnp.maximum(places, starts)[:, -1, 0, 0] > 0
    own = has_row, jax.tree.map(lambda *x: take(*x)[:, -1], last, rows)
    first = jax.tree.map(jnp.zeros_like, own)
    last = device_prefix(_join_last_rows, first, own, axis_name)[1]
  before = jax.tree.map(take, last, rows)
  return [x[:, :-1] for x in before], [x[:, -1] for x in before]


def _join_last_rows(earlier, later):
  """Joins (has a row, the last row) of two consecutive ranges of positions."""
  has_row = later[0]
  rows = jax.tree.map(
    lambda x, y: jnp.where(has_row[:, None, None], y, x), earlier[1], later[1]
  )
  return earlier[0] | has_row, rows
