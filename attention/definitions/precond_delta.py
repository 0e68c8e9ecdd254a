"""Preconditioned DeltaNet by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def precond_delta_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike,
  log_decay: ArrayLike,
  square_rate: ArrayLike,
  square_decay: ArrayLike,
  center: ArrayLike,
  squash: float = 1.5,
  epsilon: float = 1e-6,
  normalize_keys: bool = False,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: Any = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Result | tuple[Result, tuple[np.ndarray, np.ndarray]]:
  """The gated delta rule with preconditioned writes.

    A_t = e^a_t A_{t−1} + r_t k_t²        ρ_t = log(A_t + ε) − c
    p_t = k_t x^(−ρ_t / (1 + |ρ_t|))
    S_t = S' + β_t p_t (v_t − S'ᵀ k_t)ᵀ    S' = diag(e^g_t) S_{t−1}
    out_t = scale · S_tᵀ q_t

  r is `square_rate` and a is `square_decay`, each `[B, T, N]`, c is `center` `[N]`, and
  x is `squash`. States are (S, A) `[B, N, H, V]`, `[B, N, H]`. Other arguments and
  results are those of `delta_rule_attention`. Paper: arXiv:2604.21100.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )
  batch, length, _, head_dim = query.shape
  rates = beta, square_rate, square_decay, center
  beta, rate, a, center = shared.as_float64(*rates)
  g = recurrent.decays(log_decay, query)
  is_start, visible, _ = recurrent.segment_starts(
    batch, length, mask, is_causal, segment_ids
  )
  memory = np.zeros((batch, num_heads, head_dim, value.shape[3]))
  squares = np.zeros((batch, num_heads, head_dim))
  if initial_state is not None:
    memory, squares = shared.as_float64(*initial_state)
    memory, squares = memory.copy(), squares.copy()
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros(value.shape)
  for at in np.ndindex(batch, length, num_heads):
    b, t, n = at
    if is_start[b, t]:
      memory[b, n], squares[b, n] = 0.0, 0.0
    if visible[b, t]:
      k = key[at]
      squares[b, n] = np.exp(a[at]) * squares[b, n] + rate[at] * k**2
      rho = np.log(squares[b, n] + epsilon) - center[n]
      p = k * squash ** (-rho / (1.0 + np.abs(rho)))
      decayed = np.exp(g[at])[:, None] * memory[b, n]
      error = value[at] - decayed.T @ k
      memory[b, n] = decayed + beta[at] * np.outer(p, error)
    out[at] = scale * (memory[b, n].T @ query[at])
  return (out, (memory, squares)) if return_state else out


def precond_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  center: ArrayLike,
  squash: float = 1.5,
  **call: Any,
) -> Result:
  """Preconditioned DeltaNet: gates as in `gated_delta`, with extra ones for the
  squares.

  Paper: arXiv:2604.21100.
  """
  gates = {"center": center, "squash": squash}
  for prefix, beta, decay in (
    ("", "beta", "log_decay"),
    ("square_", "square_rate", "square_decay"),
  ):
    names = "rate_kernel", "step_kernel", "step_bias", "log_rate"
    rate, *step, log_rate = (call.pop(f"{prefix}{name}") for name in names)
    x = recurrent.linear(inputs, rate, np.zeros(()), call=call)
    gates[beta] = recurrent.sigmoid(x)
    steps = np.logaddexp(0.0, recurrent.linear(inputs, *step, call=call))
    gates[decay] = -np.exp(np.asarray(log_rate, np.float64)) * steps
  query, key = (
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, call)),
  )
  return recurrent.call_packed(
    precond_delta_attention, query, key, value, call, **gates
  )
