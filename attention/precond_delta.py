"""Preconditioned DeltaNet: a delta rule with updates preconditioned by past keys."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.arrays import prepare_arrays, repeat_heads, unit_length
from attention.recurrent.elementwise import (
  elementwise_recurrence,
  input_coefficients,
  read_state,
)
from attention.recurrent.packing import first_states
from attention.recurrent.recurrence import join_states, recurrent_attention
from attention.recurrent.scan import device_prefix, is_sequence_sharded


class PrecondState(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    memory: S.
    squares: A.
  """

  memory: Float[Array, "B N H V"]
  squares: Float[Array, "B N H"]


@attention_function
def precond_delta_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  beta: Float[Array, "B T N"],
  log_decay: Float[Array, "..."],
  square_rate: Float[Array, "B T N"],
  square_decay: Float[Array, "B T N"],
  center: Float[Array, "N"],
  squash: float = 1.5,
  epsilon: float = 1e-6,
  normalize_keys: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: PrecondState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], PrecondState]:
  """The gated delta rule with smaller updates along channels that keys use often.

    out = precond_delta_attention(q, k, v, beta=b, log_decay=g, square_rate=r,
        square_decay=a, center=c)

    A_t = e^a_t A_{t−1} + r_t k_t ∘ k_t        ρ_t = log(A_t + ε) − c
    p_t = k_t ∘ x^(−ρ_t / (1 + |ρ_t|))         S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t p_t (v_t − S'ᵀ k_t)ᵀ        out_t = scale · S_tᵀ q_t

  for each head. Each channel of a key is scaled by a factor from 1/x to x for writing,
  but not for reading. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    beta: β, from 0 to 1.
    log_decay: g, at most 0: `[B, T, N]` or `[B, T, N, H]`.
    square_rate: r, at least 0.
    square_decay: a, at most 0.
    center: c, the value of log(A + ε) for which the factor is 1.
    squash: x, from 1 to 2. With keys of length 1, the state does not grow.
    epsilon: ε.
    normalize_keys: as in `delta_rule_attention`.
    initial_state: the `PrecondState` before the first position; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is a
  `PrecondState`.

  Cost: that of `delta_rule_attention`; the squares take time and memory B·T·N·H.

  Paper: Preconditioned DeltaNet: curvature-aware sequence modeling for linear
  recurrences, arXiv:2604.21100.
  """
  return _recurrence(**locals())


def _recurrence(
  query,
  key,
  value,
  *,
  square_rate,
  square_decay,
  center,
  squash,
  epsilon,
  scale,
  normalize_keys=True,
  initial_state=None,
  return_state=True,
  beta,
  log_decay,
  **options,
) -> Any:
  """`precond_delta_attention`, for sequence-sharded inputs as well."""
  _check_squash(squash)
  query, dtype = repeat_heads(query, key, value), query.dtype
  arrays = key, square_rate[..., None]
  (key, rate), decay, _ = prepare_arrays(
    query, arrays, log_decay=square_decay, **options
  )
  if normalize_keys:
    query, key = unit_length(query), unit_length(key)
  batch, _, num_heads, head_dim = query.shape
  empty = _empty_state(batch, num_heads, head_dim, value.shape[3])
  state = first_states(initial_state, empty, "a PrecondState")

  def scan_squares(first):
    inputs = decay, rate * jnp.square(key)
    return elementwise_recurrence(
      input_coefficients, read_state, (), first, inputs
    )

  first = state.squares
  axis_name = options.get("axis_name")
  if is_sequence_sharded(axis_name):
    own = jnp.exp(jnp.sum(decay, axis=1)), scan_squares(first)[1]
    zeros = jax.tree.map(jnp.zeros_like, own)
    _, first = device_prefix(join_states, zeros, own, axis_name)
  squares, last = scan_squares(first)
  offset = jnp.log(squares + epsilon) - center[None, None, :, None]
  exponent = math.log(squash) * offset / (1.0 + jnp.abs(offset))
  out, memory = recurrent_attention(
    query,
    key * jnp.exp(-exponent),
    value,
    beta=beta,
    log_decay=log_decay,
    erase_gate=jnp.exp(exponent),
    scale=scale,
    initial_state=None if initial_state is None else state.memory,
    **options,
  )
  out = out.astype(dtype)
  return (out, PrecondState(memory, last)) if return_state else out


def _check_squash(squash):
  if not 1.0 <= squash <= 2.0:
    raise ValueError(f"squash: expected 1 to 2, got {squash!r}")


def _empty_state(batch, num_heads, head_dim, value_dim):
  heads = batch, num_heads, head_dim
  return PrecondState(
    jnp.zeros((*heads, value_dim), jnp.float32), jnp.zeros(heads, jnp.float32)
  )


@attention_factory
def precond_delta(squash: float = 1.5) -> Attention:
  """Preconditioned gated DeltaNet: `gated_delta` with scaled writes.

    β_t = sigmoid(x_t · W_β)        g_t = −e^A softplus(x_t · W_a + b)

  and r and a in the same way, with separate parameters.

  Args:
    squash: x of `precond_delta_attention`.

  Returns:
    A causal `Attention` with `gates`, whose cache is a `PrecondState`. Its
    parameters are those of `gated_delta`, the same with the prefix `square_`, for r and
    a, and `center [N]`, initially −0.2.

  Raises:
    ValueError: `squash` is below 1 or above 2.

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`. Queries and keys have length 1. Paper: arXiv:2604.21100.
  """
  _check_squash(squash)

  def init(key, dims):
    params = {}
    for prefix, prefix_key in zip(
      ("", "square_"), jax.random.split(key), strict=True
    ):
      rate, *steps = jax.random.split(prefix_key, 4)
      kernel = gates.kernel(rate, dims.features, dims.num_heads)
      own = {"rate_kernel": kernel, **gates.step_params(steps, dims)}
      params |= {f"{prefix}{name}": x for name, x in own.items()}
    return {**params, "center": jnp.full(dims.num_heads, -0.2)}

  def square_gate(gate):
    def prefixed_gate(params, inputs):
      own = {
        name.removeprefix("square_"): x
        for name, x in params.items()
        if name.startswith("square_")
      }
      return gate(own, inputs)

    return prefixed_gate

  def recurrence(params, *qkv, **options):
    options |= {"center": params["center"], "squash": squash}
    return _recurrence(*qkv, epsilon=1e-6, **options)

  rate, decay = gates.rate(1.0), gates.step_decay
  return gates.recurrent_mechanism(
    "precond_delta",
    recurrence,
    init=init,
    gates={
      "beta": rate,
      "log_decay": decay,
      "square_rate": square_gate(rate),
      "square_decay": square_gate(decay),
    },
    arrays=dict.fromkeys(
      ("square_rate", "square_decay"), Float[Array, "B T N"]
    ),
    init_state=lambda batch, dims: _empty_state(
      batch, dims.num_heads, dims.head_dim, dims.values
    ),
  )
