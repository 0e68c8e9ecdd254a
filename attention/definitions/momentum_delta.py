"""Momentum DeltaNet by definition, position by position."""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def momentum_delta_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike,
  eta: ArrayLike,
  log_decay: ArrayLike,
  momentum_decay: ArrayLike,
  normalize_keys: bool = False,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  **options: Any,
) -> Result | tuple[Result, Float64[np.ndarray, "B N X V"]]:
  """The gated delta rule with momentum.

    M_t = e^h_t M_{t−1} + η_t k_t (v_t − e^g_t S_{t−1}ᵀ k_t)ᵀ
    S_t = e^g_t S_{t−1} + β_t M_t        out_t = scale · S_tᵀ q_t

  with h = `momentum_decay`. The paper's M has the opposite sign. States are S and M,
  concatenated to `[B, N, 2H, V]`. Other arguments are those of `delta_rule_attention`.

  Paper: arXiv:2605.05838.
  """
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  arrays = query, key, value, beta, eta, log_decay, momentum_decay
  query, key, value, beta, eta, g, h = shared.as_float64(*arrays)
  options["num_segments"] = num_segments
  is_start, visible, segment = recurrent.segment_starts(
    *query.shape[:2], **options
  )
  num_heads = max(x.shape[2] for x in (query, key, value))
  query, key, value = (
    shared.repeat_heads(x, num_heads) for x in (query, key, value)
  )
  batch, length, _, head_dim = query.shape
  shape = batch, num_heads, 2 * head_dim, value.shape[3]
  state = recurrent.first_state(initial_state, shape, num_segments)
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros(value.shape)
  for at in np.ndindex(batch, length, num_heads):
    b, t, n = at
    own = state[b, segment[b, t], n]
    if is_start[b, t]:
      own[:] = 0.0
    memory, momentum = own[:head_dim], own[head_dim:]
    if visible[b, t]:
      error = value[at] - np.exp(g[at]) * (memory.T @ key[at])
      momentum[:] *= np.exp(h[at])
      momentum[:] += eta[at] * np.outer(key[at], error)
      memory[:] = np.exp(g[at]) * memory + beta[at] * momentum
    if visible[b, t] or num_segments is None:
      out[at] = scale * (memory.T @ query[at])
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def momentum_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  log_factor: ArrayLike,
  log_correction: ArrayLike,
  **call: Any,
) -> Result:
  """Momentum DeltaNet, with gates from an angle θ, and a multiple of k subtracted from
  q.

    η = 1 + tanh(inputs · W_η / √F)        θ = arctan(η e^f)
    β = sin²θ σ(inputs · W_β)              g = log cos²θ − e^A softplus(inputs · W_a + b)
    h = max(−e^B softplus(inputs · W_m + c), −2)

  f is `log_factor` `[N]`. The queries are q − e^d k with d = `log_correction` `[N]`.
  Queries and keys are normalised to length 1. Paper: arXiv:2605.05838.
  """
  zero, width = np.zeros(()), np.shape(inputs)[-1]
  kernels = (call.pop(f"{name}_kernel") for name in ("eta", "rate"))
  rates = [recurrent.linear(inputs, x, zero, call=call) for x in kernels]
  eta = 1.0 + np.tanh(rates[0] / np.sqrt(width))
  theta = np.arctan(eta * np.exp(np.asarray(log_factor, np.float64)))
  decays = []
  for prefix in ("", "momentum_"):
    names = "step_kernel", "step_bias", "log_rate"
    *step, log_rate = (call.pop(f"{prefix}{name}") for name in names)
    steps = np.logaddexp(0.0, recurrent.linear(inputs, *step, call=call))
    decays.append(-np.exp(np.asarray(log_rate, np.float64)) * steps)
  gates = {
    "eta": eta,
    "beta": np.sin(theta) ** 2 * recurrent.sigmoid(rates[1]),
    "log_decay": decays[0] + np.log(np.cos(theta) ** 2),
    "momentum_decay": np.maximum(decays[1], -2.0),
  }
  d = np.exp(np.asarray(log_correction, np.float64))
  query, key = (
    shared.repeat_heads(x, len(d))
    for x in (np.asarray(query, np.float64), recurrent.zero_masked(key, call))
  )
  query = recurrent.unit(query - d[:, None] * key)
  key = recurrent.unit(key)
  return recurrent.call_packed(
    momentum_delta_attention, query, key, value, call, **gates
  )
