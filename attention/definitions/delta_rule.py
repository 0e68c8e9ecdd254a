"""Delta rules by definition, with the gates of each mechanism."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  max_rate: float = 1.0,
  log_decay: ArrayLike | None = None,
  **call: Any,
) -> Result:
  """DeltaNet: queries and keys of unit length, β = max_rate · σ(inputs · W_β).

  W_β is `rate_kernel` `[F, N]`; `log_decay` is for functions that build on this one.
  Paper: arXiv:2406.06484, section 3.3.
  """
  rates = recurrent.linear(inputs, rate_kernel, np.zeros(()), call=call)
  beta = max_rate * recurrent.sigmoid(rates)
  gates = {"beta": beta, "log_decay": log_decay}
  query, key = (
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, call)),
  )
  return recurrent.call_packed(
    recurrent.delta_rule_attention, query, key, value, call, **gates
  )


def gated_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  **rest: Any,
) -> Result:
  """Gated DeltaNet: `delta` with the decays per head of Mamba-2.

  Paper: arXiv:2412.06464, equation 10.
  """
  step = np.logaddexp(
    0.0, recurrent.linear(inputs, step_kernel, step_bias, call=rest)
  )
  rate = np.exp(np.asarray(log_rate, np.float64))
  decay = -rate.reshape(-1, *[1] * (step.ndim - 3)) * step
  return delta(query, key, value, inputs=inputs, log_decay=decay, **rest)


def kimi_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  step_down: ArrayLike,
  step_up: ArrayLike,
  lower_bound: float | None = None,
  **rest: Any,
) -> Result:
  """Kimi Delta Attention: `gated_delta` with decays per channel.

  Its `step_kernel` is `step_down` `[F, R]` times `step_up` `[R, N, H]`, and its
  `step_bias` is `[N, H]`. With a bound L, log decays are L · sigmoid(e^A (x·W + b)).
  Paper: arXiv:2510.26692, section 4.
  """
  down, up = shared.as_float64(step_down, step_up)
  kernel = np.tensordot(down, up, 1)
  if lower_bound is None:
    return gated_delta(query, key, value, step_kernel=kernel, **rest)
  bias, log_rate = rest.pop("step_bias"), rest.pop("log_rate")
  steps = recurrent.linear(rest["inputs"], kernel, bias, call=rest)
  rate = np.exp(np.asarray(log_rate, np.float64))[:, None]
  decay = lower_bound * recurrent.sigmoid(rate * steps)
  return delta(query, key, value, log_decay=decay, **rest)


def comba(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  feedback: ArrayLike,
  correction: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Result:
  """Comba: `gated_delta` that erases σ(a) k before the decay and reads with q − d k.

    S_t = S_{t−1}(α_t − σ(a) β_t k_t k_tᵀ) + β_t v_t k_tᵀ        out = S_t (q_t − d k_t)

  in the paper's notation, in which S is the transpose of ours. a is `feedback` `[N]`
  and d is `correction` `[N]`. Paper: arXiv:2506.02475, table 1, equations 9 and 10.
  """
  step = np.logaddexp(
    0.0, recurrent.linear(inputs, step_kernel, step_bias, call=call)
  )
  rates = recurrent.linear(inputs, rate_kernel, np.zeros(()), call=call)
  a, d, log_rate = shared.as_float64(feedback, correction, log_rate)
  key = shared.repeat_heads(
    recurrent.unit(recurrent.zero_masked(key, call)), len(a)
  )
  value = shared.repeat_heads(recurrent.zero_masked(value, call), len(a))
  return recurrent.call_packed(
    recurrent.delta_rule_attention,
    recurrent.unit(query) - d[:, None] * key,
    key,
    value,
    call,
    beta=max_rate * recurrent.sigmoid(rates),
    log_decay=-np.exp(log_rate) * step,
    erase_key=recurrent.sigmoid(a)[:, None] * key,
  )


def gated_delta_2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  erase_kernel: ArrayLike,
  write_kernel: ArrayLike,
  step_down: ArrayLike,
  step_up: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Result:
  """Gated DeltaNet-2: b = max_rate · σ(inputs · W_b) and w = σ(inputs · W_w).

  W_b is `erase_kernel` `[F, N, H]` and W_w is `write_kernel` `[F, N, V]`; values whose
  width is not V use the mean of w. Decays are those of `kimi_delta`. Paper:
  arXiv:2605.22791.
  """
  step = recurrent.linear(inputs, step_down, step_up, step_bias, call=call)
  rate = np.exp(np.asarray(log_rate, np.float64))[:, None]
  write = recurrent.sigmoid(
    recurrent.linear(inputs, write_kernel, np.zeros(()), call=call)
  )
  if write.shape[3] != np.shape(value)[3]:
    write = write.mean(axis=3, keepdims=True)
  return recurrent.call_packed(
    recurrent.delta_rule_attention,
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, call)),
    value,
    call,
    log_decay=-rate * np.logaddexp(0.0, step),
    erase_gate=max_rate
    * recurrent.sigmoid(
      recurrent.linear(inputs, erase_kernel, np.zeros(()), call=call)
    ),
    write_gate=write,
  )
