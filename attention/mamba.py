"""Mamba-1 (S6): a state in which every entry has its own decay."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates, packing
from attention.recurrent.arrays import prepare_arrays, repeat_heads
from attention.recurrent.elementwise import elementwise_recurrence


@attention_function
def mamba_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  step: Float[Array, "B T N V"],
  log_rate: Float[Array, "N H V"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]
):
  """The selective scan: each query reads a state whose entries decay separately.

    out = mamba_attention(c, b, x, step=delta, log_rate=log_rate)

    h_t = exp(−Δ_t ∘ e^A) ∘ h_{t−1} + k_t (Δ_t ∘ v_t)ᵀ        out_t = scale · h_tᵀ q_t

  for each head. The paper's D channels are the N·V channels of all heads, its state
  size N is H, its x is v, and its B and C are k and q, which all heads share if
  Q = K = 1. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    step: Δ for each channel, at least 0.
    log_rate: A, so that −e^A is the paper's A.
    scale: None means 1.
    initial_state: h before the first position; None means 0.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`.

  Cost: time T·N·H·V; memory B·T·N·(H+V) and C states, with gradients also one state
  for each chunk of C = `scan.CHUNK` positions. A CPU computes a chunk position by
  position, other devices by an associative scan in log₂ C steps.

  Paper: Mamba: linear-time sequence modeling with selective state spaces,
  arXiv:2312.00752, equations 2a and 2b, and algorithm 2. As in its code, B is
  multiplied by Δ instead of the zero-order hold of equation 4.
  """
  query = repeat_heads(query, key, value)
  (key, value, step), _, starts = prepare_arrays(
    query,
    (key, value, step),
    log_decay=None,
    mask=mask,
    is_causal=is_causal,
    segment_ids=segment_ids,
  )
  shape = *query.shape[2:], value.shape[3]
  state = packing.first_state(initial_state, value, shape, "N, H, V", None)
  scale = 1.0 if scale is None else checks.softmax_scale(scale, shape[1])
  out, state = elementwise_recurrence(
    _coefficients,
    _read,
    jnp.exp(log_rate.astype(jnp.float32)),
    state,
    (scale * query.astype(jnp.float32), key, step, step * value),
    None if starts is None else starts[..., 0, 0],
  )
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def _coefficients(rate, x):
  _, key, step, value = x
  log_decay = jnp.einsum("...nv,nhv->...nhv", -step, rate)
  return log_decay, jnp.einsum("...nh,...nv->...nhv", key, value)


def _read(x, state):
  return jnp.einsum("...nhv,...nh->...nv", state, x[0])


@attention_factory
def mamba(
  state_size: int = 16,
  rank: int | None = None,
  norm_epsilon: float | None = None,
) -> Attention:
  """Mamba-1's S6 layer, with Δ, B and C computed from its inputs x, the queries.

    Δ_t = softplus(x_t · W₁ · W₂ + b_Δ)        B_t = x_t · W_B        C_t = x_t · W_C
    h_t = exp(−Δ_t ∘ e^A) ∘ h_{t−1} + B_t (Δ_t ∘ x_t)ᵀ
    out_t = h_tᵀ C_t + D ∘ x_t

  where x_t is one vector of the channels of all heads, and all heads share B and C. The
  scale is 1 unless a call sets it.

  Args:
    state_size: the paper's N, the size of the state of a channel.
    rank: R of W₁ and W₂; None means the paper's F / 16, or a sixteenth of the channels
      if F is unknown.
    norm_epsilon: ε of the RMS norms of x · W₁, B and C, without scales, as in Falcon
      Mamba; None means no norms.

  Returns:
    A causal `Attention`, all of whose functions expect None as key and value; `apply`
    also accepts values. Its cache is one state of N·H·`state_size`
    numbers for each example. Its parameters are `step_down [N, H, R]`, `step_up
    [R, N, H]`, `step_bias [N, H]`, `key_kernel` (W_B) and `query_kernel` (W_C), each
    `[N, H, state_size]`, `log_rate` (A) `[N, state_size, H]` and `skip` (D) `[N, H]`.

  Raises:
    ValueError: `state_size` or `rank` is not a positive int, or `norm_epsilon` is not
      above 0.

  The paper's model also has `short_convolution` with biases, `output_gate='silu'` and
  no feed-forward network. Values whose width is not H use the mean step and rate of
  their head. Paper: arXiv:2312.00752, algorithm 2 and section 3.6.
  """
  if norm_epsilon is not None and not norm_epsilon > 0.0:
    raise ValueError(
      f"norm_epsilon: expected a number above 0, got {norm_epsilon!r}"
    )

  def init(key, dims):
    heads = dims.num_heads, dims.head_dim
    channels = heads[0] * heads[1]
    size = rank or -(-(dims.features or channels) // 16)
    down, up, bias, key_key, query_key = jax.random.split(key, 5)

    def kernel(key, width):
      return gates.kernel(key, channels, width).reshape(*heads, width)

    limit = size**-0.5
    rates = jnp.log(jnp.arange(1.0, state_size + 1.0))[None, :, None]
    return {
      "step_down": kernel(down, size),
      "step_up": jax.random.uniform(
        up, (size, *heads), minval=-limit, maxval=limit
      ),
      "step_bias": gates.step_bias(bias, heads),
      "key_kernel": kernel(key_key, state_size),
      "query_kernel": kernel(query_key, state_size),
      "log_rate": jnp.broadcast_to(rates, (heads[0], state_size, heads[1])),
      "skip": jnp.ones(heads),
    }

  def recurrence(params, query, key, value, *, axis_name, **options):
    del axis_name  # The sequence is never sharded.
    x = key.astype(jnp.float32)

    def project(name):
      y = jnp.tensordot(x, params[name], 2)
      return y if norm_epsilon is None else gates.rms_norm(y, norm_epsilon)

    step = jnp.tensordot(project("step_down"), params["step_up"], 1)
    step = jax.nn.softplus(step + params["step_bias"][None, None])
    out, state = mamba_attention(
      project("query_kernel")[:, :, None],
      project("key_kernel")[:, :, None],
      value.astype(jnp.float32),
      step=gates.gate_per_channel(step, value),
      log_rate=gates.gate_per_channel(params["log_rate"][None], value)[0],
      return_state=True,
      **options,
    )
    skip = gates.gate_per_channel(params["skip"][None, None], value)
    return out + skip * value, state

  def init_state(batch, dims):
    shape = batch, dims.num_heads, state_size, dims.values
    return jnp.zeros(shape, jnp.float32)

  mechanism = gates.recurrent_mechanism(
    "mamba", recurrence, init=init, init_state=init_state, is_sharded=False
  )
  return gates.query_only("mamba", mechanism)
