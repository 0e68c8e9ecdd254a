"""The mechanisms that are recurrences, with the decays and rates of their papers."""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.recurrences import (
  delta_rule_attention,
  gated_linear_attention,
)

Out = Float64[np.ndarray, "B T N V"]


def retention(
  query: ArrayLike, key: ArrayLike, value: ArrayLike, **call: Any
) -> Out:
  """Head n decays by 1 − 2^(−5−n).

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    **call: mask, is_causal, scale, query_segment_ids, key_segment_ids.

  Paper: arXiv:2307.08621, equation 8.
  """
  decay = np.log(1.0 - 2.0 ** (-5.0 - np.arange(np.shape(query)[2])))
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return _one_sequence(
    gated_linear_attention, query, key, value, call, log_decay=decay
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
) -> Out:
  """GLA: decays σ(x W₁ W₂ + b)^(1/τ) for each channel.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    inputs: x, `[B, T, F]`.
    gate_down: W₁, `[F, R]`.
    gate_up: W₂, `[R, N, H]`.
    gate_bias: b, `[N, H]`.
    temperature: τ.
    **call: as `retention`.

  Paper: arXiv:2312.06635, section 4.4.
  """
  inputs = _of_seen(inputs, call)
  down, up, bias = shared.as_float64(gate_down, gate_up, gate_bias)
  decay = np.log(_sigmoid(_low_rank(inputs, down, up) + bias)) / temperature
  return _one_sequence(
    gated_linear_attention, query, key, value, call, log_decay=decay
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
  **call: Any,
) -> Out:
  """SSD: what is written is Δ_t k_t v_tᵀ, and D v_t is added to the result.

  Args:
    query: C, `[B, T, N, H]`.
    key: B, `[B, T, K, H]`.
    value: x, `[B, T, K, V]`.
    inputs: `[B, T, F]`.
    step_kernel: `[F, N]`.
    step_bias: `[N]`.
    log_rate: `[N]`; the decay is e^(−Δ e^log_rate).
    skip: D, `[N]`.
    scale: None is 1.
    **call: as `retention`.

  Paper: arXiv:2405.21060, section 7.
  """
  inputs = _of_seen(inputs, call)
  decay, step = _steps(inputs, step_kernel, step_bias, log_rate)
  num_heads = np.shape(query)[2]
  value, skip = shared.as_float64(value, skip)
  value = shared.repeat_heads(value, num_heads)
  batch, length = value.shape[:2]
  seen = shared.visible_tokens(call.get("mask"), batch, length)
  ids = call.get("query_segment_ids"), call.get("key_segment_ids")
  if ids[0] is not None:
    seen = seen & (np.asarray(ids[0]) == np.asarray(ids[1]))
  value = np.where(seen[:, :, None, None], value, 0.0)
  out = _one_sequence(
    gated_linear_attention,
    query,
    shared.repeat_heads(np.asarray(key), num_heads),
    value * step[..., None],
    {"scale": 1.0 if scale is None else scale, **call},
    log_decay=decay,
  )
  return out + skip[:, None] * value


def delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Out:
  """DeltaNet: queries and keys of length 1, β = σ(x W_β).

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    inputs: x, `[B, T, F]`.
    rate_kernel: W_β, `[F, N]`.
    max_rate: factor of σ.
    **call: as `retention`.

  Paper: arXiv:2406.06484, section 3.3.
  """
  return _one_sequence(
    delta_rule_attention,
    _unit(query),
    _unit(_of_seen(key, call)),
    value,
    call,
    beta=max_rate * _rate(_of_seen(inputs, call), rate_kernel),
  )


def gated_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Out:
  """Gated DeltaNet: as `delta`, with decays of heads as in `mamba2`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    inputs: x, `[B, T, F]`.
    rate_kernel: `[F, N]`.
    step_kernel: `[F, N]`.
    step_bias: `[N]`.
    log_rate: `[N]`.
    **call: as `retention`.

  Paper: arXiv:2412.06464, equation 10.
  """
  inputs = _of_seen(inputs, call)
  decay, _ = _steps(inputs, step_kernel, step_bias, log_rate)
  return _one_sequence(
    delta_rule_attention,
    _unit(query),
    _unit(_of_seen(key, call)),
    value,
    call,
    beta=max_rate * _rate(_of_seen(inputs, call), rate_kernel),
    log_decay=decay,
  )


def kimi_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  step_down: ArrayLike,
  step_up: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Out:
  """Kimi Delta Attention: as `delta`, with decays of channels.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    inputs: x, `[B, T, F]`.
    rate_kernel: `[F, N]`.
    step_down: `[F, R]`.
    step_up: `[R, N, H]`.
    step_bias: `[N, H]`.
    log_rate: `[N]`.
    **call: as `retention`.

  Paper: arXiv:2510.26692, section 4.
  """
  inputs = _of_seen(inputs, call)
  down, up, bias, rate = shared.as_float64(
    step_down, step_up, step_bias, log_rate
  )
  step = np.logaddexp(0.0, _low_rank(inputs, down, up) + bias)
  return _one_sequence(
    delta_rule_attention,
    _unit(query),
    _unit(_of_seen(key, call)),
    value,
    call,
    beta=max_rate * _rate(_of_seen(inputs, call), rate_kernel),
    log_decay=-np.exp(rate)[:, None] * step,
  )


def _of_seen(x: ArrayLike, call: Any) -> np.ndarray:
  """`x` `[B, T, …]`, 0 where a position is hidden, even if it is not finite."""
  x = np.asarray(x, np.float64)
  seen = shared.visible_tokens(call.get("mask"), *x.shape[:2])
  return np.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x, 0.0)


def _one_sequence(function, query, key, value, call, **gates):
  """A recurrence; a position with two different segment ids is in neither."""
  call = dict(call)
  query_ids = call.pop("query_segment_ids", None)
  key_ids = call.pop("key_segment_ids", None)
  if query_ids is None:
    return function(query, key, value, **gates, **call)
  same = np.asarray(query_ids) == np.asarray(key_ids)
  mask = np.asarray(call.pop("mask", True)) & same[:, None, None, :]
  out = function(
    query, key, value, mask=mask, segment_ids=key_ids, **gates, **call
  )
  return out * same[:, :, None, None]


def _unit(x: ArrayLike) -> np.ndarray:
  x = np.asarray(x, np.float64)
  return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def _sigmoid(x: np.ndarray) -> np.ndarray:
  return np.exp(-np.logaddexp(0.0, -x))


def _rate(inputs: ArrayLike, kernel: ArrayLike) -> np.ndarray:
  inputs, kernel = shared.as_float64(inputs, kernel)
  return _sigmoid(inputs @ kernel)


def _low_rank(inputs, down, up):
  return np.einsum("BTF,FR,RNH->BTNH", inputs, down, up, optimize=True)


def _steps(inputs, kernel, bias, log_rate):
  """Logarithms of the decays of heads, and Δ."""
  inputs, kernel, bias, rate = shared.as_float64(inputs, kernel, bias, log_rate)
  step = np.logaddexp(0.0, inputs @ kernel + bias)
  return -np.exp(rate) * step, step
