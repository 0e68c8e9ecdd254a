"""Recurrences, position by position: the two rules, and six mechanisms of them.

`gated_linear_attention` and `delta_rule_attention` are given decays and rates.
The other functions have those of their papers, read from `inputs` `[B, T, F]`,
and take as `**call` mask, is_causal, scale and both segment ids.
"""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.shared import Result

WithState = tuple[Result, Float64[np.ndarray, "B N H V"]]


def gated_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  **options: Any,
) -> Result | WithState:
  """A state that decays, to which every position adds.

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`. Other arguments and results: as `delta_rule_attention`.

  Paper: arXiv:2312.06635, equation 3; arXiv:2307.08621, equation 6.
  """
  options["log_decay"] = log_decay
  return delta_rule_attention(query, key, value, beta=None, **options)


def delta_rule_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike | None,
  log_decay: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Result | WithState:
  """A state that replaces what it has for a key.

    S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        out_t = scale · S_tᵀ q_t

  Args:
    query: as in `dense_attention`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    beta: β, `[B, T, N]`; None replaces nothing.
    log_decay: g, `[B, T, N]` or `[B, T, N, H]`; None is 0.
    mask: broadcastable to `[B, 1, 1, T]`: a hidden position is skipped.
    is_causal: must be True.
    scale: None is 1/√H.
    initial_state: `[B, N, H, V]`; None is 0.
    segment_ids: `[B, T]`: the state is 0 again where they change.
    return_state: whether S_T is returned as well.

  Returns:
    `[B, T, N, V]`; with `return_state` S_T as well.

  Paper: arXiv:2406.06484, equation 2; arXiv:2412.06464, equation 10;
  arXiv:2510.26692, equation 1.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  if log_decay is None:
    log_decay = np.zeros(np.shape(query)[:3])
  query, key, value, g = shared.as_float64(query, key, value, log_decay)
  batch, length, num_heads, head_dim = query.shape
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)
  g = np.broadcast_to(g if g.ndim == 4 else g[..., None], query.shape)
  seen = shared.visible_tokens(mask, batch, length)
  scale = shared.logit_scale(scale, head_dim)
  state = np.zeros((batch, num_heads, head_dim, value.shape[3]))
  if initial_state is not None:
    state = state + np.asarray(initial_state, np.float64)
  begins = np.zeros((batch, length), bool)
  if segment_ids is not None:
    begins[:, 1:] = np.diff(segment_ids, axis=1) != 0
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    if begins[b, t]:
      state[b, n] = 0.0
    if seen[b, t]:
      k, v = key[b, t, n], value[b, t, n]
      state[b, n] *= np.exp(g[b, t, n])[:, None]
      if beta is not None:
        v = np.asarray(beta)[b, t, n] * (v - state[b, n].T @ k)
      state[b, n] += np.outer(k, v)
    out[b, t, n] = scale * (state[b, n].T @ query[b, t, n])
  return (out, state) if return_state else out


def retention(
  query: ArrayLike, key: ArrayLike, value: ArrayLike, **call: Any
) -> Result:
  """RetNet: head n decays by 1 − 2^(−5−n).

  Paper: arXiv:2307.08621, equation 8.
  """
  decay = np.log(1.0 - 2.0 ** (-5.0 - np.arange(np.shape(query)[2])))
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return _packed(query, key, value, decay, None, call)


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
  """GLA: decays σ(inputs · W₁ W₂ + b)^(1/temperature) for each channel.

  W₁ is `gate_down` `[F, R]`, W₂ `gate_up` `[R, N, H]`, b `gate_bias` `[N, H]`.
  Paper: arXiv:2312.06635, section 4.4.
  """
  gates = _linear(inputs, gate_down, gate_up, gate_bias, call=call)
  decay = -np.logaddexp(0.0, -gates) / temperature
  return _packed(query, key, value, decay, None, call)


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
) -> Result:
  """SSD: what is written is Δ_t k_t v_tᵀ, and D v_t is added to the result.

  Δ = softplus(inputs · `step_kernel` `[F, N]` + `step_bias` `[N]`), the decay is
  e^(−Δ e^log_rate) with `log_rate` `[N]`, D is `skip` `[N]`. `scale` None is 1.
  Paper: arXiv:2405.21060, section 7; its C, B and x are query, key and value.
  """
  step = np.logaddexp(0.0, _linear(inputs, step_kernel, step_bias, call=call))
  rate, skip = shared.as_float64(log_rate, skip)
  key, value = (
    shared.repeat_heads(_seen(x, call), len(rate)) for x in (key, value)
  )
  call["scale"] = 1.0 if scale is None else scale
  written = value * step[..., None]
  out = _packed(query, key, written, -np.exp(rate) * step, None, call)
  return out + skip[:, None] * value


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
  """DeltaNet: queries and keys of length 1, β = max_rate · σ(inputs · W_β).

  W_β is `rate_kernel` `[F, N]`; `log_decay` is for the mechanisms that build on it.
  Paper: arXiv:2406.06484, section 3.3.
  """
  rates = _linear(inputs, rate_kernel, 0.0, call=call)
  beta = max_rate * np.exp(-np.logaddexp(0.0, -rates))
  if log_decay is None:
    log_decay = np.zeros(beta.shape)
  query, key = _unit(np.asarray(query, np.float64)), _unit(_seen(key, call))
  return _packed(query, key, value, log_decay, beta, call)


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
  """Gated DeltaNet: as `delta`, with decays of heads as in `mamba2`.

  Paper: arXiv:2412.06464, equation 10.
  """
  step = np.logaddexp(0.0, _linear(inputs, step_kernel, step_bias, call=rest))
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
  **rest: Any,
) -> Result:
  """Kimi Delta Attention: as `gated_delta`, with decays of channels.

  Its `step_kernel` is `step_down` `[F, R]` times `step_up` `[R, N, H]`, and its
  `step_bias` is `[N, H]`. Paper: arXiv:2510.26692, section 4.
  """
  down, up = shared.as_float64(step_down, step_up)
  rest["step_kernel"] = np.tensordot(down, up, 1)
  return gated_delta(query, key, value, **rest)


def _seen_positions(call, batch, length):
  """`[B, T]`: what mask and segment ids leave, and where the two ids agree."""
  same = np.ones((batch, length), bool)
  if call.get("query_segment_ids") is not None:
    same &= np.equal(call["query_segment_ids"], call["key_segment_ids"])
  return same & shared.visible_tokens(call.get("mask"), batch, length), same


def _packed(query, key, value, log_decay, beta, call) -> Any:
  """The recurrence; a position with two different segment ids is in neither."""
  seen, same = _seen_positions(call, *np.shape(query)[:2])
  call = {**call, "beta": beta, "log_decay": log_decay}
  call.pop("query_segment_ids", None)
  call["segment_ids"] = call.pop("key_segment_ids", None)
  call["mask"] = seen[:, None, None, :]
  out = delta_rule_attention(query, key, value, **call)
  return out * same[:, :, None, None]


def _seen(x, call):
  """`x` in float64, 0 at positions that are hidden, even if it is NaN there."""
  x = np.asarray(x, np.float64)
  return shared.zero_hidden(x, _seen_positions(call, *x.shape[:2])[0])


def _linear(inputs, *weights, call):
  """X W₁ … + b, for the weights W₁, …, b."""
  *kernels, bias = shared.as_float64(*weights)
  x = _seen(inputs, call)
  for kernel in kernels:
    x = np.tensordot(x, kernel, 1)
  return x + bias


def _unit(x):
  return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
