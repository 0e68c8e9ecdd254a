"""Mamba-2: a state space model with one rate for each head (SSD)."""

import jax
import jax.numpy as jnp

from attention import plug
from attention.recurrent import gates, record


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
    return record.Operands(query, key, value, given["log_decay"])

  def skip(params, out, value):
    value = _of_heads(value, out.shape[2]).astype(jnp.float32)
    return out + params["skip"][None, None, :, None] * value

  return record.record(
    "mamba2",
    operands,
    init=init,
    gates=read,
    reads=record.GATES,
    skip=skip,
    scale=1.0,
  )


def _of_heads(x, num_heads):
  return jnp.repeat(x, num_heads // x.shape[2], axis=2)
