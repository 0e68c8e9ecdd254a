"""Gated linear attention, and three mechanisms that differ in their decays.

How the recurrence is computed chunk by chunk is in `recurrence`; what is read from
inputs, and the record, in `gates`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, gates, plug
from attention.recurrence import recurrent_attention


@arguments.attention_function()
def gated_linear_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  log_decay: Float[Array, "..."],
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
  """Each query reads a state to which every position adds, and which decays.

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`, for each head. The result is a weighted sum of values that
  nothing divides. Everything is float32 for inputs of any dtype.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K).
    value: `[B, T, K, V]`.
    log_decay: natural logarithms of the decays, at most 0: `[B, T, N]`, one for a
      head (RetNet, Mamba-2), or `[B, T, N, H]`, one for each channel (GLA).
    mask: key mask `[B, 1, 1, T]`, True = attend. A hidden position adds nothing,
      and nothing decays there.
    is_causal: must be True, because a state knows the past only.
    scale: None is 1/√H.
    initial_state: S before the first position; None is 0. The first segment goes
      on from it.
    segment_ids: `[B, T]`; where they change, the state begins anew, at 0.
    return_state: whether to return S_T as well.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, and with `return_state` the state
    `[B, N, H, V]` in float32.

  Raises:
    ValueError: arguments do not fit together, the mask varies along queries, or
      `is_causal` is False.

  Cost, with C = `recurrence.CHUNK`: time T·N·(C·(H+V) + H·V), with decays for each
  channel also 2·T·N·H·log₂ C exponentials; memory B·T·N·(H+V), with gradients also
  one state for each chunk.

  Paper: Gated linear attention transformers, arXiv:2312.06635; RetNet,
  arXiv:2307.08621; Transformers are SSMs (Mamba-2), arXiv:2405.21060.
  """
  arguments.check_flag("return_state", return_state)
  out, state = recurrent_attention(
    "gated_linear",
    query,
    key,
    value,
    log_decay,
    None,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def gated_linear(rank: int = 16, temperature: float = 16.0) -> plug.Attention:
  """Gated linear attention (GLA): a decay for each channel, read from the inputs.

    g_t = log sigmoid(x_t · W₁ · W₂ + b) / τ

  Args:
    rank: R, of the product of W₁ `[F, R]` and W₂ `[R, N, H]`.
    temperature: τ; the larger it is, the nearer are the decays to 1.

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameters are `gate_down [F, R]`,
    `gate_up [R, N, H]` and `gate_bias [N, H]`.

  Raises:
    ValueError: `rank` is not a positive int, or `temperature` is not above 0.

  Its model also has `output_norm='rms'` and `output_gate='silu'`.

  Paper: Gated linear attention transformers with hardware-efficient training,
  arXiv:2312.06635, equation 4 and section 4.4.
  """
  arguments.check_at_least("rank", rank, 1)
  if not temperature > 0.0:
    raise ValueError(f"temperature: expected more than 0, got {temperature!r}")

  def init(key, dims):
    features = gates.width("gated_linear", dims)
    down, up = jax.random.split(key)
    heads = dims.num_heads, dims.head_dim
    return {
      "params": {
        "gate_down": gates.kernel(down, features, rank),
        "gate_up": gates.kernel(up, rank, *heads),
        "gate_bias": jnp.zeros(heads),
      }
    }

  def read(params, inputs):
    low = gates.project(inputs, params["gate_down"])
    x = gates.project(low, params["gate_up"]) + params["gate_bias"][None, None]
    return {"log_decay": jax.nn.log_sigmoid(x) / temperature}

  def operands(params, query, key, value, given):
    del params
    return gates.Operands(query, key, value, given["log_decay"])

  return gates.recurrent_mechanism(
    "gated_linear", operands, init=init, gates=read, reads=("log_decay",)
  )


def retention() -> plug.Attention:
  """Retention (RetNet): head n forgets the share 2^(−5−n) of its state a position.

    S_t = γ_n S_{t−1} + k_t v_tᵀ        out_t = S_tᵀ q_t / √H        γ_n = 1 − 2^(−5−n)

  It is `gated_linear_attention` with decays that nothing is read for. Heads beyond
  the twentieth have the decay of the twentieth, which float32 can tell from 1.

  Returns:
    An `Attention` without variables, causal only, that decodes with one state of
    N·H² numbers for each example.

  The paper's model also has `position='rotary'`, `output_norm='group'` and
  `output_gate='silu'`.

  Paper: Retentive network, arXiv:2307.08621, equations 5 to 8.
  """

  def operands(params, query, key, value, given):
    del params, given
    heads = jnp.minimum(jnp.arange(query.shape[2]), 19)
    decay = jnp.log1p(-(2.0 ** (-5.0 - heads)))
    decay = jnp.broadcast_to(decay[None, None], query.shape[:3])
    return gates.Operands(query, key, value, decay)

  return gates.recurrent_mechanism("retention", operands)


def mamba2() -> plug.Attention:
  """Mamba-2's mixer: steps Δ from the inputs say how much is kept and written.

    Δ_t = softplus(x_t · W_Δ + b_Δ)
    S_t = e^(−Δ_t e^A) S_{t−1} + Δ_t k_t v_tᵀ        out_t = S_tᵀ q_t + D v_t

  with A, b_Δ and D for each head. In the paper's letters, k is B, q is C and v is
  x; e^A is written A there. The scale is 1 unless a call has one.

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameters are `step_kernel [F, N]`,
    `step_bias`, `log_rate` (A) and `skip` (D), each `[N]`.

  Its model also has `short_convolution` with biases, `output_gate='silu'`,
  `output_norm='rms_joint'` and `num_qk_heads`: the heads share queries and keys.

  Paper: Transformers are SSMs, arXiv:2405.21060, sections 6 and 7.
  """

  def init(key, dims):
    features = gates.width("mamba2", dims)
    of_kernel, of_bias, of_rate = jax.random.split(key, 3)
    num_heads = dims.num_heads
    return {
      "params": {
        "step_kernel": gates.kernel(of_kernel, features, num_heads),
        "step_bias": gates.step_bias(of_bias, num_heads),
        "log_rate": gates.rates(of_rate, num_heads),
        "skip": jnp.ones(num_heads),
      }
    }

  def read(params, inputs):
    step, decay = gates.steps(params, inputs)
    return {"log_decay": decay, "beta": step}

  def operands(params, query, key, value, given):
    del params
    value = _of_heads(value, query.shape[2]) * given["beta"][..., None]
    key = _of_heads(key, query.shape[2])
    return gates.Operands(query, key, value, given["log_decay"])

  def skip(params, out, value):
    value = _of_heads(value, out.shape[2]).astype(jnp.float32)
    return out + params["skip"][None, None, :, None] * value

  return gates.recurrent_mechanism(
    "mamba2",
    operands,
    init=init,
    gates=read,
    reads=("log_decay", "beta"),
    skip=skip,
    scale=1.0,
  )


def _of_heads(x, num_heads):
  return jnp.repeat(x, num_heads // x.shape[2], axis=2)
