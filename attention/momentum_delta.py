"""Momentum DeltaNet: a delta rule whose updates accumulate with momentum.

With α = e^g, μ = e^h and the error e_t = v_t − α_t S_{t−1}ᵀ k_t, the two matrices follow

    [S_t]   [α_t  β_t μ_t] [S_{t−1}]   [β_t η_t k_t]
    [M_t] = [ 0      μ_t ] [M_{t−1}] + [    η_t k_t] e_tᵀ

for each head. The error at j contributes to S_t with the weight η_j Σ_i α_(i,t] β_i
μ_(j,i] over j ≤ i ≤ t, where an index is the range of a product. These weights are the
product of two triangles of decays, in which no exponent is positive. With them, a chunk
is computed as for the delta rule in `recurrent.recurrence`, and the state has both
matrices.
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
  unit_length,
)
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  device_prefix,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import (
  LOG_ZERO,
  decay_to_end,
  inverse,
  pair_decays,
)


@attention_function
def momentum_delta_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  beta: Float[Array, "B T N"],
  eta: Float[Array, "B T N"],
  log_decay: Float[Array, "B T N"],
  momentum_decay: Float[Array, "B T N"],
  normalize_keys: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N X V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N X V"]]
):
  """The gated delta rule with momentum: updates accumulate in a second matrix.

    out = momentum_delta_attention(q, k, v, beta=b, eta=n, log_decay=g,
        momentum_decay=h)

    M_t = e^h_t M_{t−1} + η_t k_t (v_t − e^g_t S_{t−1}ᵀ k_t)ᵀ
    S_t = e^g_t S_{t−1} + β_t M_t        out_t = scale · S_tᵀ q_t

  for each head. With h = −∞ it is the gated delta rule with writing strength βη.
  All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    beta: β, at least 0, the weight of M in the update of S.
    eta: η, at least 0, the weight of the error in the update of M.
    log_decay: g, at most 0.
    momentum_decay: h, at most 0.
    normalize_keys: as in `delta_rule_attention`.
    scale: factor of the queries; None means 1/√H.
    initial_state: S stacked on M before the first position, X = 2H; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is `[B, N, 2H, V]`, or
  with `num_segments` `[B, G, N, 2H, V]`.

  Cost, with C = `scan.CHUNK`: time T·N·(C·(3C + 4H + V) + 6·H·V), with gradients about
  three times that; memory B·T·N·(H+V), with gradients also one state for each chunk.

  The paper's M has the opposite sign. Paper: MDN: parallelizing stepwise momentum for
  delta linear attention, arXiv:2605.05838.
  """
  return _recurrence(**locals())


def _recurrence(
  query,
  key,
  value,
  *,
  beta,
  eta,
  log_decay,
  momentum_decay,
  mask,
  is_causal,
  scale,
  initial_state,
  segment_ids,
  num_segments=None,
  normalize_keys=False,
  return_state=True,
  axis_name=None,
) -> Any:
  """`momentum_delta_attention`, for sequence-sharded inputs as well."""
  query, dtype = repeat_heads(query, key, value), query.dtype
  options = {"mask": mask, "is_causal": is_causal, "axis_name": axis_name}
  options["segment_ids"], packed = segment_ids, None
  if num_segments is not None:
    packed = packing.make_packing(query, num_segments, options)
  arrays = key, value, *(x[..., None] for x in (beta, eta, momentum_decay))
  arrays, log_decay, starts = prepare_arrays(
    query, arrays, log_decay=log_decay, **options
  )
  key, value, beta, eta, momentum_decay = arrays
  if starts is not None:
    momentum_decay = jnp.where(starts, LOG_ZERO, momentum_decay)
  query = query.astype(jnp.float32)
  if normalize_keys:
    query, key = map(unit_length, (query, key))
  num_heads, head_dim = query.shape[2:]
  shape = num_heads, 2 * head_dim, value.shape[3]
  state = packing.first_state(
    initial_state, value, shape, "N, 2H, V", num_segments
  )
  query *= checks.softmax_scale(scale, head_dim)
  rates = beta, eta, log_decay, momentum_decay
  if is_sequence_sharded(axis_name):
    state = _state_before(key, value, rates, axis_name)
  inputs = query, key, value, *rates
  attend = functools.partial(_attend, size=packed and packed.size)
  out, state = packing.results(attend, packed, inputs, state)
  out = out.astype(dtype)
  return (out, state) if return_state else out


def _state_before(key, value, rates, axis_name):
  """The final state of the shards of earlier devices.

  One call computes two final states: from I with values of 0, and from 0 with `value`.
  """
  batch, _, num_heads, head_dim = key.shape
  size = 2 * head_dim
  identity = jnp.eye(size, size + value.shape[3], dtype=key.dtype)[None, None]
  identity = jnp.broadcast_to(identity, (batch, num_heads, *identity.shape[2:]))
  zeros = jnp.zeros_like(value, shape=(*value.shape[:3], size))
  values = jnp.concatenate([zeros, value], axis=3)
  after, _ = _attend((key, key, values, *rates), identity)
  own = after[..., :size], after[..., size:]
  first = jax.tree.map(jnp.zeros_like, own)
  return device_prefix(recurrence.join_states, first, own, axis_name)[1]


def _attend(inputs, state, resets=None, size=None):
  """The final state and the results, with `resets` also the states of chunks."""
  query, _, value, *_ = inputs
  size = size or chunk_size(query.shape[1])
  numbers = 4 * size + 5 * query.shape[3] + 2 * value.shape[3]
  count = chunks_per_step(query, size, numbers)
  # Two arrays, because a CPU would copy halves of one at each position.
  state, out = scan(
    functools.partial(_step, count),
    (),
    tuple(jnp.split(state, 2, axis=-2)),
    (*inputs, resets and packing.pad_to_steps(resets, count)),
    size=size * count,
    position=_position if resets is None else None,
  )
  return jnp.concatenate(state, axis=-2), out


def _position(params, state, inputs):
  """One position `[B, N, ·]`, by the paper's equations."""
  del params
  query, key, value, beta, eta, *decays, _ = inputs
  decay, momentum_decay = (jnp.exp(x)[..., None] for x in decays)
  memory, momentum = state
  memory = decay * memory
  error = value - jnp.einsum("bnh,bnhv->bnv", key, memory)
  momentum = momentum_decay * momentum
  momentum += jnp.einsum("bnh,bnv->bnhv", eta * key, error)
  memory += beta[..., None] * momentum
  out = jnp.einsum("bnh,bnhv->bnv", query, memory)
  return (memory, momentum), out


def _step(count, params, state, inputs):
  """`count` consecutive chunks, `[B, N, count, C, ·]`."""
  del params
  *arrays, resets = inputs
  query, key, value, beta, eta, log_decay, momentum_decay = chunks(
    arrays, count
  )
  decays = jnp.tril(pair_decays(log_decay), -1)
  momentum = jnp.tril(pair_decays(momentum_decay))
  from_start, momentum_start = (
    jnp.exp(jnp.cumsum(x, axis=3)) for x in (log_decay, momentum_decay)
  )
  # The weights in S of earlier errors and of the initial M, before and after adding M.
  weights = decays @ (beta * momentum)
  initial_weights = decays @ (beta * momentum_start)
  erase_keys = [from_start * key, initial_weights * key]
  overlaps = jnp.einsum("...ch,...sh->...cs", key, key)
  overlaps *= jnp.swapaxes(eta, -2, -1)
  solution = inverse(jnp.tril(overlaps * weights, -1))
  weights += beta * momentum
  initial_weights += beta * momentum_start
  queries = jnp.concatenate(
    [from_start * query, initial_weights * query], axis=-1
  )
  scores = jnp.einsum("...ch,...sh->...cs", query, eta * key) * weights
  # At the end of the chunk, from sums of decays alone, for the precision of gradients.
  to_end = jnp.swapaxes(beta * jnp.exp(decay_to_end(log_decay)), -2, -1)
  momentum_end = jnp.swapaxes(jnp.exp(decay_to_end(momentum_decay)), -2, -1)
  last = to_end @ momentum, momentum_end
  columns = jnp.swapaxes(eta * key, -2, -1)
  write = jnp.concatenate([x * columns for x in last], axis=-2)
  erase = solution @ jnp.concatenate(erase_keys, axis=-1)
  head_dim = key.shape[-1]

  def apply_decays(x):
    """Applies the decays of the chunk to S stacked on M, ignoring its errors."""
    memory, momentum = jnp.split(x, 2, axis=-2)
    decay, momentum_decay = (
      y[..., -1:, :] for y in (from_start, momentum_start)
    )
    memory = decay * memory + to_end @ momentum_start * momentum
    return jnp.concatenate([memory, momentum_decay * momentum], axis=-2)

  before = jnp.concatenate(state, axis=-2)[:, :, None]
  if count > 1 or resets is not None:
    identity = jnp.eye(2 * head_dim, dtype=key.dtype)[None, None, None]
    transition = apply_decays(identity) - write @ erase
    first = jnp.zeros_like(transition[:, :, :1]), before
    own = transition, write @ (solution @ value)
    resets = packing.head_resets(resets, transition)
    _, before = chunk_prefixes(recurrence.join_states, first, own, resets)
  error = solution @ value - erase @ before
  out = unchunk(scores @ error + queries @ before)
  after = apply_decays(before) + write @ error
  if resets is not None:
    out = packing.with_states(out, after)
  return tuple(jnp.split(after[:, :, -1], 2, axis=-2)), out


@attention_factory
def momentum_delta() -> Attention:
  """Momentum DeltaNet: `momentum_delta_attention` with gates that ensure stability.

    η_t = 1 + tanh(x_t · W_η / √F)           θ_t = arctan(η_t e^f)
    β_t = sin²θ_t · sigmoid(x_t · W_β)       g_t = log cos²θ_t − e^A softplus(x_t · W_a + b)
    h_t = max(−e^B softplus(x_t · W_m + c), −2)

  Queries are q_t − e^d k_t. Queries and keys are then normalised to length 1.

  Returns:
    A causal `Attention` with `gates`, whose cache is N·2H·H numbers per
    example. Its parameters are `eta_kernel`, `rate_kernel`, the decays' `step_kernel`,
    `step_bias` and `log_rate`, the same with the prefix `momentum_`, and `log_factor
    [N]` (f) and `log_correction [N]` (d).

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`. Differs from the authors' code in its initial decays, which are
  those of `mamba2`. Paper: arXiv:2605.05838; its gates are those of
  flash-linear-attention 0.6.0.
  """

  def init(key, dims):
    eta, rate, factor, correction, *rest = jax.random.split(key, 10)
    heads, params = (dims.num_heads,), {}
    for prefix, keys in (("", rest[:3]), ("momentum_", rest[3:])):
      own = gates.step_params(keys, dims)
      params |= {f"{prefix}{name}": x for name, x in own.items()}
    return {
      **params,
      "eta_kernel": gates.kernel(eta, dims.features, *heads),
      "rate_kernel": gates.kernel(rate, dims.features, *heads),
      "log_factor": jnp.log(jax.random.uniform(factor, heads, maxval=4.0)),
      "log_correction": jnp.log(jax.random.uniform(correction, heads)),
    }

  def eta(params, inputs):
    x = gates.project(inputs, params["eta_kernel"])
    return 1.0 + jnp.tanh(x / inputs.shape[-1] ** 0.5)

  def squared_tangent(params, inputs):
    """(tan θ)²."""
    factor = jnp.exp(params["log_factor"])[None, None]
    return jnp.square(eta(params, inputs) * factor)

  def beta(params, inputs):
    square = squared_tangent(params, inputs)
    rate = gates.rate(1.0)(params, inputs)
    return rate * square / (1.0 + square)

  def log_decay(params, inputs):
    square = squared_tangent(params, inputs)
    return gates.step_decay(params, inputs) - jnp.log1p(square)

  def momentum_decay(params, inputs):
    prefix = "momentum_"
    own = {
      name.removeprefix(prefix): x
      for name, x in params.items()
      if name.startswith(prefix)
    }
    return jnp.maximum(gates.step_decay(own, inputs), -2.0)

  def recurrence_with_correction(params, query, key, value, **options):
    factor = jnp.exp(params["log_correction"])[None, None, :, None]
    query = query - factor * key
    return _recurrence(query, key, value, normalize_keys=True, **options)

  def init_state(batch, dims):
    shape = batch, dims.num_heads, 2 * dims.head_dim, dims.values
    return jnp.zeros(shape, jnp.float32)

  names = "eta", "momentum_decay"
  return gates.recurrent_mechanism(
    "momentum_delta",
    recurrence_with_correction,
    init=init,
    gates={
      "beta": beta,
      "eta": eta,
      "log_decay": log_decay,
      "momentum_decay": momentum_decay,
    },
    arrays=dict.fromkeys(names, Float[Array, "B T N"]),
    init_state=init_state,
  )
