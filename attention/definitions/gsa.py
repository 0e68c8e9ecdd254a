"""Gated slot attention by definition, position by position."""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def gsa_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  slot_weights: ArrayLike,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> Result | tuple[Result, Float64[np.ndarray, "B N M X"]]:
  """Softmax over M slots, which hold decaying sums of keys and of values.

    K_t = diag(e^g_t) K_{t−1} + s_t k_tᵀ        V_t = diag(e^g_t) V_{t−1} + s_t v_tᵀ
    out_t = V_tᵀ softmax(scale · K_t q_t)

  g is `log_decay` and s is `slot_weights`, each `[B, T, N, M]`; states are [K, V]
  `[B, N, M, H+V]`. Other arguments and results are those of `delta_rule_attention`.
  Paper: arXiv:2409.07146, section 3.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  query, key, value, decay, slots = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value, log_decay, slot_weights)
  )
  batch, length, _, head_dim = query.shape
  options = mask, is_causal, segment_ids, num_segments
  is_start, visible, segment = recurrent.segment_starts(batch, length, *options)
  shape = batch, num_heads, slots.shape[3], head_dim + value.shape[3]
  state = recurrent.first_state(initial_state, shape, num_segments)
  scale = shared.logit_scale(scale, head_dim)
  out = np.zeros(value.shape)
  for at in np.ndindex(batch, length, num_heads):
    b, t, n = at
    own = state[b, segment[b, t], n]
    if is_start[b, t]:
      own[:] = 0.0
    if visible[b, t]:
      own *= np.exp(decay[at])[:, None]
      own += np.outer(slots[at], np.concatenate([key[at], value[at]]))
    if visible[b, t] or num_segments is None:
      weights = shared.softmax(scale * (own[:, :head_dim] @ query[at]))
      out[at] = weights @ own[:, head_dim:]
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def gsa(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  gate_kernel: ArrayLike,
  temperature: float = 8.0,
  scale: float | None = None,
  **call: Any,
) -> Result:
  """GSA with the decays e^g = σ(inputs · W)^(1/temperature) and slot weights 1 − e^g.

  W is `gate_kernel` `[F, N, M]`, and `scale` None is 1. Paper: arXiv:2409.07146,
  section 3.
  """
  gates = recurrent.linear(inputs, gate_kernel, np.zeros(()), call=call)
  decay = -np.logaddexp(0.0, -gates) / temperature
  call["scale"] = 1.0 if scale is None else scale
  gates = {"log_decay": decay, "slot_weights": 1.0 - np.exp(decay)}
  return recurrent.call_packed(gsa_attention, query, key, value, call, **gates)
