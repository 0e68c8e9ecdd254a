"""Titans' neural memory, as one matrix: gradient descent with momentum and decay.

    S_t = e^m_t S_{t−1} + w_t e_tᵀ        M_t = e^g_t M_{t−1} + S_t        w_t = 2 θ_t k_t

where e_t = v_t − M_{t'}ᵀ k_t, and t' is the last position before the mini-batch of t. In a
chunk of C positions, with M and S before it, f_i = e^(Σ g) and
h_i = Σ_j e^(Σ g over j < u ≤ i) e^(Σ m over u ≤ j),

    M_i = f_i M + h_i S + Σ_l c_il w_l e_lᵀ        c = D^g D^m

where D^g and D^m are the triangles of decays between two positions. So e solves a
triangular system, (I + c_t'l k_tᵀ w_l) e = v − …, for mini-batches of any size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates, recurrence
from attention.recurrent.arrays import (
  chunks,
  prepare_arrays,
  repeat_heads,
  unchunk,
  unit_length,
)
from attention.recurrent.minibatches import minibatches
from attention.recurrent.packing import first_states
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  scan,
)
from attention.recurrent.triangular import (
  LOG_ZERO,
  inverse,
  pair_decays,
  shift,
)


class TitansState(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    memory: M.
    momentum: S.
    start: M before the current mini-batch, at which gradients are taken.
    count: the number of positions in the current mini-batch.
  """

  memory: Float[Array, "B N H V"]
  momentum: Float[Array, "B N H V"]
  start: Float[Array, "B N H V"]
  count: Int[Array, "B"]


@attention_function
def titans_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  learning_rate: Float[Array, "B T N"],
  log_momentum: Float[Array, "B T N"],
  log_decay: Float[Array, "B T N"],
  minibatch_size: int = 16,
  normalize_keys: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: TitansState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], TitansState]:
  """Each query reads a matrix that gradient descent with momentum fits to (k, v) pairs.

    out = titans_attention(q, k, v, learning_rate=theta, log_momentum=m, log_decay=g)

    ℓ_t(M) = |Mᵀ k_t − v_t|²
    S_t = e^m_t S_{t−1} − θ_t ∇ℓ_t(M_{t'})        M_t = e^g_t M_{t−1} + S_t
    out_t = scale · M_tᵀ q_t

  for each head, where t' is the last position before the mini-batch of t: all positions
  of a mini-batch take gradients at the same memory. In the paper's letters, e^m is η
  and e^g is 1 − α. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    learning_rate: θ, at least 0. With mini-batches of one position, keys of length 1
      and no momentum, the memory does not grow if θ ≤ 1.
    log_momentum: m, at most 0; −∞ is not allowed.
    log_decay: g, at most 0.
    minibatch_size: the paper's b. With 1, t' is t − 1, the exact recurrence of
      equations 13 and 14.
    normalize_keys: as in `delta_rule_attention`.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    initial_state: the `TitansState` before the first position; None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0, and a mini-batch
      starts.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is a `TitansState`.

  Cost, with C = `scan.CHUNK`: time T·N·(C·(3C+2H+2V) + 9·H·V), on a CPU without
  derivatives 5·T·N·H·V; memory B·T·N·(H+V), with gradients also three states for each
  chunk. The cost does not depend on the mini-batch size.

  Paper: Titans: learning to memorize at test time, arXiv:2501.00663, sections 3.1 and
  3.2, with a linear memory.
  """
  query, dtype = repeat_heads(query, key, value), query.dtype
  (key, value, rate, momentum), decay, starts = prepare_arrays(
    query,
    (key, value, learning_rate[..., None], log_momentum[..., None]),
    log_decay=log_decay,
    mask=mask,
    is_causal=is_causal,
    segment_ids=segment_ids,
  )
  query = query.astype(jnp.float32)
  if normalize_keys:
    query, key = unit_length(query), unit_length(key)
  batch, length, num_heads, head_dim = query.shape
  shape = batch, num_heads, head_dim, value.shape[3]
  state = first_states(initial_state, _empty_state(shape), "a TitansState")
  batches = minibatches(query, mask, starts, state.count, minibatch_size)
  if starts is not None:
    momentum = jnp.where(starts, LOG_ZERO, momentum)
  flags = [batches.keep, batches.starts | batches.segment_starts]
  flags += [] if starts is None else [batches.segment_starts]
  size = chunk_size(length)
  count = chunks_per_step(query, size, 4 * size + 4 * (head_dim + shape[3]))
  (memory, momentum, start), out = scan(
    functools.partial(_step, count),
    (),
    tuple(state[:3]),
    (
      query * checks.softmax_scale(scale, head_dim),
      key,
      value,
      2.0 * rate * key,
      momentum,
      decay,
      jnp.stack(flags, axis=2)[:, :, None],
    ),
    size=size * count,
    position=_position,
  )
  out = out.astype(dtype)
  state = TitansState(memory, momentum, start, batches.count)
  return (out, state) if return_state else out


def _empty_state(shape):
  zeros = jnp.zeros(shape, jnp.float32)
  return TitansState(zeros, zeros, zeros, jnp.zeros(shape[0], jnp.int32))


def _position(params, state, inputs):
  """One position `[B, N, ·]`, by the paper's equations."""
  del params
  memory, momentum, start = state
  query, key, value, write_keys, log_momentum, log_decay, flags = inputs
  shape = *query.shape[:2], flags.shape[-1]
  flags = jnp.broadcast_to(flags, shape).astype(query.dtype)
  keep, opens, *starts = jnp.split(flags[..., None], shape[2], axis=2)
  start = jnp.where(opens > 0.0, memory, start)
  if starts:  # A product with ones would double the time of XLA:CPU.
    start *= 1.0 - starts[0]
  error = value - jnp.einsum("bnhv,bnh->bnv", start, key)
  momentum = jnp.exp(log_momentum)[..., None] * momentum
  momentum += write_keys[..., None] * error[..., None, :]
  memory = jnp.exp(log_decay)[..., None] * memory
  memory += keep * momentum
  out = jnp.einsum("bnhv,bnh->bnv", memory, query)
  return (memory, momentum, start), out


def _step(count, params, state, inputs):
  """`count` consecutive chunks, `[B, N, count, C, ·]`."""
  del params
  query, key, value, write_keys, log_momentum, log_decay, flags = chunks(
    inputs, count
  )
  keep, opens, *starts = jnp.split(flags, flags.shape[-1], axis=-1)
  decays = jnp.tril(pair_decays(log_decay)) * jnp.swapaxes(keep, -2, -1)
  momenta = jnp.tril(pair_decays(log_momentum))
  momentum_decay = jnp.exp(jnp.cumsum(log_momentum, axis=-2))
  # M_i = f_i M + h_i S + Σ_l c_il w_l e_lᵀ, in one array [f, h, c].
  memory_decay = jnp.exp(jnp.cumsum(log_decay, axis=-2))
  after = jnp.concatenate(
    [memory_decay, decays @ momentum_decay, decays @ momenta], axis=-1
  )

  # The same for the memory before the mini-batch of each position, which is 0 if the
  # mini-batch is the first of its segment.
  number = jnp.cumsum(opens, axis=-2, dtype=jnp.int32)
  in_first = (number == 0).astype(key.dtype)
  openings = opens & ~starts[0] if starts else opens
  openings = jnp.swapaxes(openings, -2, -1)
  openings &= number == jnp.swapaxes(number, -2, -1)
  before = shift(after, 1).at[..., 0, 0].set(1.0)
  before = jnp.tril(openings).astype(key.dtype) @ before

  # The columns are for M, S and the `start` of the state.
  def columns(x, *factors):
    return jnp.concatenate([factor * x for factor in factors], axis=-1)

  f, h, weights = jnp.split(before, [1, 2], axis=-1)
  key_columns = columns(key, f, h, in_first)
  solution = inverse(weights * (key @ jnp.swapaxes(write_keys, -2, -1)))
  f, h, weights = jnp.split(after, [1, 2], axis=-1)
  query_columns = columns(query, f, h, 0.0)
  scores = weights * (query @ jnp.swapaxes(write_keys, -2, -1))
  last = [x[..., -1:, :] for x in (after, momenta, before)]
  ends = last[0][..., 2:], last[1], last[2][..., 2:]
  ends = [jnp.swapaxes(x, -2, -1) for x in ends]
  final = jnp.swapaxes(columns(write_keys, *ends), -2, -1)
  zeros = jnp.zeros_like(momentum_decay[..., -1:, :])
  rows = (
    jnp.concatenate([last[0][..., :2], zeros], axis=-1),
    jnp.concatenate([zeros, momentum_decay[..., -1:, :], zeros], axis=-1),
    jnp.concatenate([last[2][..., :2], in_first[..., -1:, :] + zeros], axis=-1),
  )
  factors = jnp.concatenate(rows, axis=-2)

  def apply_decays(state):
    x = state.reshape(*state.shape[:-2], 3, -1, state.shape[-1])
    x = jnp.einsum("...ij,...jhv->...ihv", factors, x)
    return x.reshape(*x.shape[:-3], *state.shape[-2:])

  state = jnp.concatenate(state, axis=-2)[:, :, None]
  if count > 1:
    unit = jnp.eye(state.shape[-2], dtype=key.dtype)
    unit = jnp.broadcast_to(unit, (*key_columns.shape[:3], *unit.shape))
    transition = apply_decays(unit) - final @ (solution @ key_columns)
    own = transition, final @ (solution @ value)
    first = jnp.zeros_like(transition[:, :, :1]), state
    _, state = chunk_prefixes(recurrence.join_states, first, own)
  error = solution @ (value - key_columns @ state)
  out = query_columns @ state + scores @ error
  state = (apply_decays(state) + final @ error)[:, :, -1]
  return tuple(jnp.split(state, 3, axis=-2)), unchunk(out)


@attention_factory
def titans(minibatch_size: int = 16, max_rate: float = 0.1) -> Attention:
  """Titans' neural memory, with rates computed from the inputs of its layer.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        θ_t = max_rate · sigmoid(x_t · W_θ + b_θ)
    m_t = log sigmoid(x_t · W_m + b_m)         g_t = log sigmoid(x_t · W_g + b_g)

  Args:
    minibatch_size: the paper's b.
    max_rate: the largest θ.

  Returns:
    A causal `Attention` with `gates`, whose cache is a `TitansState`. Its
    parameters are `rate_kernel`, `momentum_kernel` and `decay_kernel`, each `[F, N]`, and
    `rate_bias`, `momentum_bias` (initially 0) and `decay_bias` (initially 4), each `[N]`.

  Raises:
    ValueError: `minibatch_size` is not a positive int, or `max_rate` is not above 0.

  The paper's model also has `short_convolution`, whose SiLU is the paper's,
  `output_norm='rms'` and `output_gate='sigmoid'`. The memory is one matrix, whose
  initial value is 0; the paper uses MLPs, and does not say how rates are computed.
  Paper: arXiv:2501.00663, sections 3.1, 3.2 and 4.4.
  """
  if not max_rate > 0.0:
    raise ValueError(f"max_rate: expected a number above 0, got {max_rate!r}")
  names = "rate", "momentum", "decay"

  def init(key, dims):
    keys = jax.random.split(key, 3)
    params = {
      f"{name}_kernel": gates.kernel(key, dims.features, dims.num_heads)
      for name, key in zip(names, keys, strict=True)
    }
    for name in names:
      first = 4.0 if name == "decay" else 0.0
      params[f"{name}_bias"] = jnp.full(dims.num_heads, first)
    return params

  def memory(params, *qkv, axis_name, **options):
    del params, axis_name  # The sequence is never sharded.
    options |= {"minibatch_size": minibatch_size, "normalize_keys": True}
    out, state = titans_attention(*qkv, **options, return_state=True)
    return out, state

  return gates.recurrent_mechanism(
    "titans",
    memory,
    init=init,
    gates={
      "learning_rate": gates.affine_gate(
        "rate", lambda x: max_rate * jax.nn.sigmoid(x)
      ),
      "log_momentum": gates.affine_gate("momentum", jax.nn.log_sigmoid),
      "log_decay": gates.affine_gate("decay", jax.nn.log_sigmoid),
    },
    arrays=dict.fromkeys(
      ("learning_rate", "log_momentum"), Float[Array, "B T N"]
    ),
    init_state=lambda batch, dims: _empty_state(
      (batch, dims.num_heads, dims.head_dim, dims.values)
    ),
    is_sharded=False,
  )
