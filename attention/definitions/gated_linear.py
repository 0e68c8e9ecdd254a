"""Gated linear attention by definition, with the decays of each mechanism."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def retention(
  query: ArrayLike, key: ArrayLike, value: ArrayLike, **call: Any
) -> Result:
  """RetNet: head n decays by 1 − 2^(−5−n).

  Paper: arXiv:2307.08621, equation 8.
  """
  decay = np.log(1.0 - 2.0 ** (-5.0 - np.arange(np.shape(query)[2])))
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return recurrent.call_packed(
    recurrent.delta_rule_attention, query, key, value, call, log_decay=decay
  )


def lightning(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  depth: float = 0.0,
  slopes: str = "alibi",
  **call: Any,
) -> Result:
  """MiniMax-01: head n of N decays by exp(−2^(−8(n+1)/N) · (1 − depth + 10⁻⁵)).

  Paper: arXiv:2501.08313, section 2.2, for N a power of two. For other N, heads beyond
  the largest power of two P ≤ N have every other slope of 2P heads, as in ALiBi. With
  `slopes` 'geometric', as in transformers, the formula is the same for any N.
  """
  num_heads = np.shape(query)[2]
  power = 1 << (num_heads.bit_length() - 1)
  if slopes == "geometric":
    power = num_heads
  rates = [
    2.0
    ** (
      -8 * (n + 1) / power if n < power else -4 * (2 * (n - power) + 1) / power
    )
    for n in range(num_heads)
  ]
  decay = -np.array(rates) * (1.0 - depth + 1e-5)
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return recurrent.call_packed(
    recurrent.delta_rule_attention, query, key, value, call, log_decay=decay
  )


def gated_linear(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  gate_down: ArrayLike,
  gate_up: ArrayLike,
  gate_bias: ArrayLike,
  temperature: float = 16.0,
  **call: Any,
) -> Result:
  """GLA: decays σ(inputs · W₁ W₂ + b)^(1/temperature) per channel.

  W₁ is `gate_down` `[F, R]`, W₂ is `gate_up` `[R, N, H]` and b is `gate_bias` `[N, H]`.
  Paper: arXiv:2312.06635, section 4.4.
  """
  gates = recurrent.linear(inputs, gate_down, gate_up, gate_bias, call=call)
  decay = -np.logaddexp(0.0, -gates) / temperature
  return recurrent.call_packed(
    recurrent.delta_rule_attention, query, key, value, call, log_decay=decay
  )


def hgrn2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  lower_bound: float = 0.0,
  scale: float | None = None,
  **call: Any,
) -> Result:
  """HGRN2: `key` has the logits of the forget gates f, and the keys are 1 − f.

    f_t = γ + (1 − γ) σ(k_t)        S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ

  Queries are q σ(q). γ is `lower_bound`, and `scale` None is 1.
  Paper: arXiv:2404.07904, section 3.
  """
  query = np.asarray(query, np.float64)
  query = query * recurrent.sigmoid(query)
  key = shared.repeat_heads(recurrent.zero_masked(key, call), query.shape[2])
  forget = lower_bound + (1.0 - lower_bound) * recurrent.sigmoid(key)
  call["scale"] = 1.0 if scale is None else scale
  return recurrent.call_packed(
    recurrent.delta_rule_attention,
    query,
    1.0 - forget,
    value,
    call,
    log_decay=np.log(forget),
  )


def mamba2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  skip: ArrayLike,
  scale: float | None = None,
  projection_bias: ArrayLike = 0.0,
  step_factor: float = 1.0,
  min_step: float = 0.0,
  max_step: float | None = None,
  rule: Callable[..., Any] = recurrent.delta_rule_attention,
  **call: Any,
) -> Result:
  """Mamba-2 (SSD): the state update is Δ_t k_t v_tᵀ, and D v_t is added to the result.

  Δ = softplus(`step_factor` (inputs · `step_kernel` `[F, N]` + `projection_bias` `[N]`)
  + `step_bias` `[N]`), clipped to `min_step` and `max_step`; the decay is
  e^(−Δ e^log_rate) with `log_rate` `[N]`, and D is `skip` `[N]`. `scale` None is 1.
  `rule` is for log-linear attention, which builds on this function.
  Paper: arXiv:2405.21060, section 7; its C, B and x are query, key and value.
  """
  rate, skip, bias = shared.as_float64(log_rate, skip, step_bias)
  logits = recurrent.linear(inputs, step_kernel, projection_bias, call=call)
  step = np.logaddexp(0.0, step_factor * logits + bias)
  step = np.clip(step, min_step, max_step)
  key, value = (
    shared.repeat_heads(recurrent.zero_masked(x, call), len(rate))
    for x in (key, value)
  )
  call["scale"] = 1.0 if scale is None else scale
  scaled_value = value * step[..., None]
  decay = -np.exp(rate) * step
  out = recurrent.call_packed(
    rule, query, key, scaled_value, call, log_decay=decay
  )
  return out + skip[:, None] * value
