"""Gated KalmaNet, position by position, with an exact linear solve for each query."""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def gka_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  beta: ArrayLike,
  alpha: ArrayLike,
  ridge_ratio: float = 0.02,
  normalize_keys: bool = False,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  **options: Any,
) -> Result | tuple[Result, Float64[np.ndarray, "B N H X"]]:
  """Ridge regression from keys to values, read by a mixture of solution and query.

    H_t = e^g_t H_{t−1} + β_t k_t k_tᵀ        U_t = e^g_t U_{t−1} + β_t k_t v_tᵀ
    x_t = (H_t + r ‖H_t‖_F I)⁻¹ q_t
    out_t = scale · U_tᵀ (α_t x_t + (1 − α_t) q_t)

  with r = `ridge_ratio`, and α = 0 at masked positions. The paper's U is the transpose
  of this one. The result is 0 if H is 0. States are [H, U] `[B, N, H, H+V]`. Other
  arguments are those of `delta_rule_attention`.

  Paper: arXiv:2511.21016, section 4.
  """
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  arrays = query, key, value, log_decay, beta, alpha
  query, key, value, g, beta, alpha = shared.as_float64(*arrays)
  options["num_segments"] = num_segments
  is_start, visible, segment = recurrent.segment_starts(
    *query.shape[:2], **options
  )
  num_heads = max(x.shape[2] for x in (query, key, value))
  query, key, value = (
    shared.repeat_heads(x, num_heads) for x in (query, key, value)
  )
  batch, length, _, head_dim = query.shape
  shape = batch, num_heads, head_dim, head_dim + value.shape[3]
  state = recurrent.first_state(initial_state, shape, num_segments)
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros(value.shape)
  for at in np.ndindex(batch, length, num_heads):
    b, t, n = at
    own, mix = state[b, segment[b, t], n], 0.0
    if is_start[b, t]:
      own[:] = 0.0
    if visible[b, t]:
      k, v, mix = key[at], value[at], alpha[at]
      update = beta[at] * np.outer(k, np.concatenate([k, v]))
      own[:] = np.exp(g[at]) * own + update
    elif num_segments is not None:
      continue
    covariance, memory = own[:, :head_dim], own[:, head_dim:]
    norm = np.linalg.norm(covariance)
    if norm > 0.0:
      system = covariance + ridge_ratio * norm * np.eye(head_dim)
      x = np.linalg.solve(system, query[at])
      mixed = mix * x + (1.0 - mix) * query[at]
      out[at] = scale * (memory.T @ mixed)
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def gka(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  rate_bias: ArrayLike,
  alpha_kernel: ArrayLike,
  alpha_bias: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  ridge_ratio: float = 0.02,
  **call: Any,
) -> Result:
  """Gated KalmaNet: α = σ(inputs · W_α + b_α) and β = (σ(inputs · W_β + b_β) + 10⁻⁶)².

  W_α is `alpha_kernel` `[F, N]` and W_β is `rate_kernel` `[F, N]`. Decays are those of
  `gated_delta`. Queries and keys are normalised to length 1. Paper: arXiv:2511.21016,
  section 4.
  """

  def gate(*weights):
    return recurrent.sigmoid(recurrent.linear(inputs, *weights, call=call))

  step = recurrent.linear(inputs, step_kernel, step_bias, call=call)
  rate = np.exp(np.asarray(log_rate, np.float64))
  gates = {
    "alpha": gate(alpha_kernel, alpha_bias),
    "beta": (gate(rate_kernel, rate_bias) + 1e-6) ** 2,
    "log_decay": -rate * np.logaddexp(0.0, step),
    "ridge_ratio": ridge_ratio,
  }
  query, key = (
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, call)),
  )
  return recurrent.call_packed(gka_attention, query, key, value, call, **gates)
