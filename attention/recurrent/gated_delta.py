"""Gated DeltaNet: the delta rule with a decay for each head."""

import jax

from attention import plug
from attention.recurrent import gates, record


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
  gates.check_max_rate(max_rate)

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
    return {"log_decay": decay, "beta": gates.rate(params, inputs, max_rate)}

  def operands(params, query, key, value, given):
    del params
    query, key = gates.unit_length(query), gates.unit_length(key)
    return record.Operands(query, key, value, **given)

  return record.record(
    "gated_delta", operands, init=init, gates=read, reads=record.GATES
  )
