"""Kimi Delta Attention: the delta rule with a decay for each channel."""

import jax
import jax.numpy as jnp

from attention import arguments, plug
from attention.recurrent import gates, record


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
  gates.check_max_rate(max_rate)

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
    return {"log_decay": decay, "beta": gates.rate(params, inputs, max_rate)}

  def operands(params, query, key, value, given):
    del params
    query, key = gates.unit_length(query), gates.unit_length(key)
    return record.Operands(query, key, value, **given)

  return record.record(
    "kimi_delta", operands, init=init, gates=read, reads=record.GATES
  )
