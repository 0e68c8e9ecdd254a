"""Titans' neural memory by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def titans_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  learning_rate: ArrayLike,
  log_momentum: ArrayLike,
  log_decay: ArrayLike,
  minibatch_size: int = 16,
  normalize_keys: bool = False,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: Any = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Any:
  """Gradient descent with momentum and decay on a linear memory.

    ℓ_t(M) = |Mᵀ k_t − v_t|²
    S_t = e^m_t S_{t−1} − θ_t ∇ℓ_t(M_{t'})        M_t = e^g_t M_{t−1} + S_t
    out_t = scale · M_tᵀ q_t

  θ is `learning_rate`, m is `log_momentum` and g is `log_decay`, each `[B, T, N]`.
  M_{t'} is the memory before the mini-batch of `minibatch_size` visible positions. The
  state is M, S, M_{t'} and the number of positions in the mini-batch. Other arguments
  are those of `delta_rule_attention`. Paper: arXiv:2501.00663, equations 12 to 16.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )
  theta, m, g = shared.as_float64(learning_rate, log_momentum, log_decay)
  batch, length, _, head_dim = query.shape
  is_start, visible, _ = recurrent.segment_starts(
    batch, length, mask, is_causal, segment_ids
  )
  memory = np.zeros((batch, num_heads, head_dim, value.shape[3]))
  momentum, start = np.zeros_like(memory), np.zeros_like(memory)
  count = np.zeros(batch, np.int32)
  if initial_state is not None:
    memory, momentum, start = (
      np.array(x, np.float64) for x in initial_state[:3]
    )
    count = np.array(initial_state[3])
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros(value.shape)
  for b, t in np.ndindex(batch, length):
    if is_start[b, t]:
      memory[b], momentum[b], start[b], count[b] = 0.0, 0.0, 0.0, 0
    if visible[b, t]:
      if count[b] == minibatch_size:
        start[b], count[b] = memory[b], 0
      count[b] += 1
      for n in range(num_heads):
        k = key[b, t, n]
        gradient = 2.0 * np.outer(k, start[b, n].T @ k - value[b, t, n])
        momentum[b, n] *= np.exp(m[b, t, n])
        momentum[b, n] -= theta[b, t, n] * gradient
        memory[b, n] = np.exp(g[b, t, n]) * memory[b, n] + momentum[b, n]
    for n in range(num_heads):
      out[b, t, n] = scale * (memory[b, n].T @ query[b, t, n])
  return (out, (memory, momentum, start, count)) if return_state else out


def titans(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  max_rate: float = 0.1,
  **call: Any,
) -> Result:
  """Titans: θ = `max_rate` · σ(x W_θ + b_θ), e^m = σ(x W_m + b_m), e^g = σ(x W_g +
  b_g).

  W are `rate_kernel`, `momentum_kernel` and `decay_kernel` `[F, N]`, and b are
  `rate_bias`, `momentum_bias` and `decay_bias` `[N]`. Queries and keys are normalised
  to length 1. Paper: arXiv:2501.00663, section 3.1.
  """
  rate, m, g = (
    recurrent.linear(
      inputs, call.pop(f"{name}_kernel"), call.pop(f"{name}_bias"), call=call
    )
    for name in ("rate", "momentum", "decay")
  )
  return recurrent.call_packed(
    titans_attention,
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, call)),
    value,
    call,
    learning_rate=max_rate * recurrent.sigmoid(rate),
    log_momentum=-np.logaddexp(0.0, -m),
    log_decay=-np.logaddexp(0.0, -g),
  )
