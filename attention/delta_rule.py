"""The delta rule: a state that replaces what it has for a key.

How the recurrence is computed chunk by chunk is in `recurrence`; what is read from
inputs, and the record, in `gates`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, gates, plug
from attention.recurrence import recurrent_attention


@arguments.attention_function()
def delta_rule_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  beta: Float[Array, "B T N"],
  log_decay: Float[Array, "..."] | None = None,
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
  """Each position moves what the state has for its key towards its value.

    S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`, for each head. It is one step of gradient descent on
  ½|Sᵀk − v|². With keys of length 1 and β = 1, S_tᵀ k_t = v_t; longer keys need
  β|k|² ≤ 2, or the state grows. Everything is float32 for inputs of any dtype.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K). Normalise them ahead of the call.
    value: `[B, T, K, V]`.
    beta: β.
    log_decay: natural logarithms of the decays, at most 0: None for none
      (DeltaNet), `[B, T, N]`, one for a head (Gated DeltaNet), or `[B, T, N, H]`,
      one for each channel (Kimi Delta Attention).
    mask: key mask `[B, 1, 1, T]`, True = attend. A hidden position changes
      nothing, and nothing decays there.
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

  Cost, with C = `recurrence.CHUNK`: that of `gated_linear_attention`, and
  T·N·C·(C+2H+V) for the products of keys and the triangle.

  Paper: Parallelizing linear transformers with the delta rule over sequence length,
  arXiv:2406.06484; Gated delta networks, arXiv:2412.06464; Kimi Linear,
  arXiv:2510.26692.
  """
  arguments.check_flag("return_state", return_state)
  out, state = recurrent_attention(
    "delta_rule",
    query,
    key,
    value,
    log_decay,
    beta,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def delta(max_rate: float = 1.0) -> plug.Attention:
  """DeltaNet: the delta rule with keys of length 1 and a rate from the inputs.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        β_t = sigmoid(x_t · W_β)

  Nothing decays.

  Args:
    max_rate: the largest β. Beyond 1, up to 2, a key may change the sign of what is
      there for it, with which a state can follow permutations (arXiv:2411.12537).

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameter is `rate_kernel [F, N]`.

  Raises:
    ValueError: `max_rate` is not above 0 and at most 2.

  Its model also has `short_convolution`, whose SiLU is the paper's, and
  `output_norm='rms'`.

  Paper: Parallelizing linear transformers with the delta rule over sequence length,
  arXiv:2406.06484, section 3.3.
  """
  _check_max_rate(max_rate)

  def init(key, dims):
    features = gates.width("delta", dims)
    kernel = gates.kernel(key, features, dims.num_heads)
    return {"params": {"rate_kernel": kernel}}

  def read(params, inputs):
    return {"beta": _rate(params, inputs, max_rate)}

  return gates.recurrent_mechanism(
    "delta", _operands, init=init, gates=read, reads=("beta",)
  )


def gated_delta(max_rate: float = 1.0) -> plug.Attention:
  """Gated DeltaNet: the delta rule, and a decay of each head as in Mamba-2.

    g_t = −e^A softplus(x_t · W_a + b)        β_t = sigmoid(x_t · W_β)
    k_t, q_t ← k_t / |k_t|, q_t / |q_t|

  Args:
    max_rate: the largest β. Beyond 1, up to 2, a key may change the sign of what is
      there for it, with which a state can follow permutations (arXiv:2411.12537).

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameters are `rate_kernel [F, N]`,
    `step_kernel [F, N]`, `step_bias [N]` and `log_rate [N]` (A).

  Raises:
    ValueError: `max_rate` is not above 0 and at most 2.

  Its model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`; Qwen3-Next has three such layers to one of exact attention.

  Paper: Gated delta networks, arXiv:2412.06464, equation 10 and section 3.4.
  """
  _check_max_rate(max_rate)

  def init(key, dims):
    features = gates.width("gated_delta", dims)
    of_rate, of_step, of_bias, of_decay = jax.random.split(key, 4)
    num_heads = dims.num_heads
    return {
      "params": {
        "rate_kernel": gates.kernel(of_rate, features, num_heads),
        "step_kernel": gates.kernel(of_step, features, num_heads),
        "step_bias": gates.step_bias(of_bias, num_heads),
        "log_rate": gates.rates(of_decay, num_heads),
      }
    }

  def read(params, inputs):
    _, decay = gates.steps(params, inputs)
    return {"log_decay": decay, "beta": _rate(params, inputs, max_rate)}

  return gates.recurrent_mechanism(
    "gated_delta", _operands, init=init, gates=read, reads=("log_decay", "beta")
  )


def kimi_delta(
  rank: int | None = None, max_rate: float = 1.0
) -> plug.Attention:
  """Kimi Delta Attention (KDA): the delta rule, and a decay of each channel.

    g_t = −e^A softplus(x_t · W₁ · W₂ + b)        β_t = sigmoid(x_t · W_β)
    k_t, q_t ← k_t / |k_t|, q_t / |q_t|

  with A for each head and b for each channel.

  Args:
    rank: R, of the product of W₁ `[F, R]` and W₂ `[R, N, H]`; None is H, as in
      the paper.
    max_rate: the largest β, as `delta` takes it.

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameters are `rate_kernel [F, N]`,
    `step_down [F, R]`, `step_up [R, N, H]`, `step_bias [N, H]` and
    `log_rate [N]` (A).

  Raises:
    ValueError: `rank` is neither None nor a positive int, or `max_rate` is not
      above 0 and at most 2.

  Its model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='sigmoid'`, and three such layers to one of exact attention.

  Paper: Kimi Linear, arXiv:2510.26692, sections 3 and 4.
  """
  if rank is not None:
    arguments.check_at_least("rank", rank, 1)
  _check_max_rate(max_rate)

  def init(key, dims):
    features = gates.width("kimi_delta", dims)
    of_rate, down, up, of_bias, of_decay = jax.random.split(key, 5)
    heads = dims.num_heads, dims.head_dim
    inner = rank or dims.head_dim
    return {
      "params": {
        "rate_kernel": gates.kernel(of_rate, features, dims.num_heads),
        "step_down": gates.kernel(down, features, inner),
        "step_up": gates.kernel(up, inner, *heads),
        "step_bias": gates.step_bias(of_bias, *heads),
        "log_rate": gates.rates(of_decay, dims.num_heads),
      }
    }

  def read(params, inputs):
    step = gates.project(inputs, params["step_down"])
    step = gates.project(step, params["step_up"])
    step = jax.nn.softplus(step + params["step_bias"][None, None])
    decay = -step * jnp.exp(params["log_rate"])[None, None, :, None]
    return {"log_decay": decay, "beta": _rate(params, inputs, max_rate)}

  return gates.recurrent_mechanism(
    "kimi_delta", _operands, init=init, gates=read, reads=("log_decay", "beta")
  )


def _operands(params, query, key, value, given):
  """With queries and keys of length 1."""
  del params
  query, key = gates.unit_length(query), gates.unit_length(key)
  return gates.Operands(query, key, value, **given)


def _rate(params, inputs, most):
  """β = most · sigmoid(x · W_β), how much of a value replaces what is there."""
  return most * jax.nn.sigmoid(gates.project(inputs, params["rate_kernel"]))


def _check_max_rate(max_rate):
  """Raises ValueError for a β with which states of keys of length 1 grow."""
  if not 0.0 < max_rate <= 2.0:
    raise ValueError(
      f"max_rate: expected above 0 and at most 2, got {max_rate!r}"
    )
