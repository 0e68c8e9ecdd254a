"""RWKV-6 (Finch) by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.recurrent import WithState
from attention.definitions.shared import Result


def rwkv6_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  bonus: ArrayLike,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> Result | WithState:
  """Out = scale · (S_{t−1} + (u ∘ k_t) v_tᵀ)ᵀ q_t, S_t = diag(e^g_t) S_{t−1} + k_t
  v_tᵀ.

  g is `log_decay` `[B, T, N, H]` and u is `bonus` `[N, H]`. A masked position neither
  writes nor has a bonus. Other arguments and results are those of
  `delta_rule_attention`. Paper: arXiv:2404.05892, section 4.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )
  batch, length, _, head_dim = query.shape
  decay, u = np.exp(np.asarray(log_decay, np.float64)), np.asarray(bonus)
  options = mask, is_causal, segment_ids, num_segments
  is_start, visible, segment = recurrent.segment_starts(batch, length, *options)
  shape = batch, num_heads, head_dim, value.shape[3]
  state = recurrent.first_state(initial_state, shape, num_segments)
  out = np.zeros(value.shape)
  for at in np.ndindex(batch, length, num_heads):
    b, t, n = at
    before = state[b, segment[b, t], n]
    if is_start[b, t]:
      before[:] = 0.0
    read = before
    if visible[b, t]:
      read = before + np.outer(u[n] * key[at], value[at])
      new = decay[at][:, None] * before + np.outer(key[at], value[at])
      state[b, segment[b, t], n] = new
    if visible[b, t] or num_segments is None:
      out[at] = shared.logit_scale(scale, head_dim) * (read.T @ query[at])
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def rwkv6(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  decay_down: ArrayLike,
  decay_up: ArrayLike,
  decay_bias: ArrayLike,
  bonus: ArrayLike,
  scale: float | None = None,
  **call: Any,
) -> Result:
  """RWKV-6 with the log decays g_t = −exp(w₀ + tanh(x_t A) B).

  A is `decay_down` `[F, R]`, B is `decay_up` `[R, N, H]`, w₀ is `decay_bias` `[N, H]`.
  Paper: arXiv:2404.05892, section 4.
  """
  x = np.tanh(recurrent.linear(inputs, decay_down, np.zeros(()), call=call))
  up, bias = shared.as_float64(decay_up, decay_bias)
  call["scale"] = 1.0 if scale is None else scale
  gates = {"log_decay": -np.exp(np.tensordot(x, up, 1) + bias), "bonus": bonus}
  return recurrent.call_packed(
    rwkv6_attention, query, key, value, call, **gates
  )
