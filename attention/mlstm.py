"""mLSTM (xLSTM): a normalised matrix state with an exponential input gate."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.platform import backend
from attention.recurrent import gates
from attention.recurrent.arrays import prepare_arrays, repeat_heads
from attention.recurrent.packing import first_states
from attention.recurrent.scan import CHUNK, chunk_size, scan
from attention.recurrent.triangular import LOG_ZERO, decay_to_end, pair_sums

_HIGHEST = 80.0
"""Largest and smallest exponent of e^(−m), so that it stays in float32's range."""


class MlstmState(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    memory: C.
    normaliser: n.
    maximum: m; the unscaled C and n are `memory` and `normaliser` times e^m.
  """

  memory: Float[Array, "B N H V"]
  normaliser: Float[Array, "B N H"]
  maximum: Float[Array, "B N"]


@attention_function
def mlstm_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N"],
  log_input: Float[Array, "B T N"],
  epsilon: float = 0.0,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: MlstmState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], MlstmState]:
  """Each query reads a normalised, decaying state with exponential input gates.

    out = mlstm_attention(q, k, v, log_decay=g, log_input=i)

    m_t = max(g_t + m_{t−1}, i_t)        m_0 = 0
    C_t = e^(g_t + m_{t−1} − m_t) C_{t−1} + e^(i_t − m_t) k_t v_tᵀ
    n_t = e^(g_t + m_{t−1} − m_t) n_{t−1} + e^(i_t − m_t) k_t
    out_t = scale · C_tᵀ q_t / (max(|scale · n_tᵀ q_t|, e^(−m_t)) + ε)

  for each head. The running maximum m prevents overflow. With ε = 0 it does not change
  the output, which is that of m = 0. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    log_decay: g, the logarithm of the forget gate, at most 0.
    log_input: i, the logarithm of the input gate, of any sign.
    epsilon: ε, from the authors' code; the paper has none.
    initial_state: the `MlstmState` before the first position; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is an
  `MlstmState`.

  Cost: that of `gated_linear_attention` with decays for each head; with gradients also
  one state for each chunk. On accelerators, chunks are 16 times as long.

  Paper: xLSTM: extended long short-term memory, arXiv:2405.04517, equations 15 to 17
  and 19 to 27.
  """
  query = repeat_heads(query, key, value)
  arrays = key, value, log_decay[..., None], log_input[..., None]
  (key, value, log_decay, log_input), _, starts = prepare_arrays(
    query,
    arrays,
    log_decay=None,
    mask=mask,
    is_causal=is_causal,
    segment_ids=segment_ids,
  )
  batch, length, num_heads, head_dim = query.shape
  keep = checks.key_mask(mask, query, query)
  if keep is None:
    keep = jnp.ones((batch, length), bool)
  if starts is None:
    starts = jnp.zeros((batch, length, 1, 1), bool)
  empty = _empty_state(batch, num_heads, head_dim, value.shape[3])
  state = first_states(initial_state, empty, "an MlstmState")
  scaled = query.astype(jnp.float32) * checks.softmax_scale(scale, head_dim)
  keep = keep[..., None, None]
  xs = scaled, key, value, log_decay, log_input, starts, keep
  # Few large steps for accelerators, whose products of matrices are fast.
  size = chunk_size(length, CHUNK if backend.name() == "cpu" else 16 * CHUNK)
  step = functools.partial(_step, epsilon)
  state, out = scan(step, (), state, xs, size=size)
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def _empty_state(batch, num_heads, head_dim, value_dim):
  heads = batch, num_heads
  shapes = (*heads, head_dim, value_dim), (*heads, head_dim), heads
  return MlstmState(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def _step(epsilon, params, state, xs):
  """One chunk `[B, C, N, ·]`."""
  del params
  query, key, value, log_decay, log_input, starts, keep = (
    jnp.swapaxes(x, 1, 2) for x in xs
  )
  # The output depends on m only through ε.
  constant = (lambda x: x) if epsilon else jax.lax.stop_gradient
  # Masked positions and the padding of a chunk do not raise m.
  log_input = jnp.where(keep, log_input, LOG_ZERO)
  ones = jnp.ones_like(value[..., :1])
  value = jnp.concatenate([value, ones], axis=-1)
  before = jnp.concatenate([state.memory, state.normaliser[..., None]], axis=-1)
  # A segment starts from m = 0 before its first position.
  start_decay = jnp.where(starts, log_decay, LOG_ZERO)
  log_decay = jnp.where(starts, LOG_ZERO, log_decay)
  causal = jnp.tri(query.shape[2], dtype=bool)
  decays = jnp.where(causal, pair_sums(log_decay, 0.5 * LOG_ZERO), -jnp.inf)
  maximum = state.maximum[..., None, None]
  from_start = jnp.cumsum(log_decay, axis=2)
  to_end = decay_to_end(log_decay)

  # The output.
  logits = decays + jnp.swapaxes(log_input, 2, 3)
  start_logits = decays + jnp.swapaxes(start_decay, 2, 3)
  largest = jnp.maximum(logits, start_logits).max(axis=3, keepdims=True)
  largest = jnp.maximum(largest, from_start + maximum)
  largest = constant(largest)
  scores = (query @ jnp.swapaxes(key, 2, 3)) * jnp.exp(logits - largest)
  sums = scores @ value
  sums += (query * jnp.exp(from_start + maximum - largest)) @ before
  floor = jnp.exp(jnp.clip(-largest, -_HIGHEST, _HIGHEST))
  out = _normalize(sums, floor, epsilon)

  # The state after the chunk.
  last = to_end + log_input
  final = jnp.maximum(last, to_end + start_decay).max(axis=2, keepdims=True)
  decayed = from_start[:, :, -1:] + maximum
  final = constant(jnp.maximum(final, decayed))
  keys = jnp.swapaxes(key * jnp.exp(last - final), 2, 3)
  after = jnp.exp(decayed - final) * before + keys @ value
  state = MlstmState(after[..., :-1], after[..., -1], final[..., 0, 0])
  return state, jnp.swapaxes(out, 1, 2)


def _normalize(sums, floor, epsilon):
  """Divides the sums of values by max(|sum of ones|, floor) + ε."""
  total = jnp.maximum(jnp.abs(sums[..., -1:]), floor) + epsilon
  # The normaliser is first scaled to 1: the derivative of a quotient squares its
  # denominator, which would leave float32's range.
  inverse = jax.lax.stop_gradient(1.0 / total)
  return sums[..., :-1] * inverse / (total * inverse)


@attention_factory
def mlstm(
  gate_soft_cap: float | None = None, epsilon: float = 0.0
) -> Attention:
  """The mLSTM, with gates computed from the inputs of its layer.

    g_t = log sigmoid(cap(x_t · W_f + b_f))        i_t = cap(x_t · W_i + b_i)

  with one number for each head, and cap(y) = c · tanh(y / c).

  Args:
    gate_soft_cap: c; None means no cap, as in the paper. xLSTM-7B has 15.
    epsilon: as in `mlstm_attention`.

  Returns:
    A causal `Attention` with `gates`, whose cache is an `MlstmState`. Its
    parameters are `forget_kernel` and `input_kernel`, each `[F, N]`, `forget_bias` and
    `input_bias`, each `[N]`.

  Raises:
    ValueError: `gate_soft_cap` is not above 0, or `epsilon` is below 0.

  The paper's model also has `output_norm='group'` and `output_gate='sigmoid'`. Papers:
  arXiv:2405.04517, equations 19 to 27; xLSTM 7B, arXiv:2503.13427.
  """
  if gate_soft_cap is not None:
    checks.check_soft_cap(gate_soft_cap, "gate_soft_cap")
  if not epsilon >= 0.0:
    raise ValueError(f"epsilon: expected at least 0, got {epsilon!r}")

  def init(key, dims):
    shape, heads = (dims.features, dims.num_heads), dims.num_heads
    # As in the authors' code: slow decays, and input gates that do not depend on x.
    return {
      "forget_kernel": jnp.zeros(shape),
      "forget_bias": jnp.linspace(3.0, 6.0, heads),
      "input_kernel": jnp.zeros(shape),
      "input_bias": 0.1 * jax.random.normal(key, (heads,)),
    }

  def cap(x):
    if gate_soft_cap is None:
      return x
    return gate_soft_cap * jnp.tanh(x / gate_soft_cap)

  def recurrence(params, *qkv, axis_name, **options) -> Any:
    del params, axis_name  # The sequence is never sharded.
    return mlstm_attention(*qkv, epsilon=epsilon, return_state=True, **options)

  return gates.recurrent_mechanism(
    "mlstm",
    recurrence,
    init=init,
    gates={
      "log_decay": gates.affine_gate(
        "forget", lambda x: jax.nn.log_sigmoid(cap(x))
      ),
      "log_input": gates.affine_gate("input", cap),
    },
    arrays={"log_input": Float[Array, "B T N"]},
    init_state=lambda batch, dims: _empty_state(
      batch, dims.num_heads, dims.head_dim, dims.values
    ),
    is_sharded=False,
  )
