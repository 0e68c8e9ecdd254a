"""Mamba-1 (S6) by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.recurrent import WithState
from attention.definitions.shared import Result


def mamba_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  step: ArrayLike,
  log_rate: ArrayLike,
  scale: float | None = None,
  **options: Any,
) -> Result | WithState:
  """h_t = e^(Δ_t A) ∘ h_{t−1} + B_t (Δ_t ∘ x_t)ᵀ, out = scale · h_tᵀ C_t.

  C, B and x are `query`, `key` and `value`, Δ is `step` `[B, T, N, V]` and A is
  −e^`log_rate` `[N, H, V]`. Other arguments are those of `delta_rule_attention`, but
  `scale` None is 1. Paper: arXiv:2312.00752, equations 2a and 2b. Δ_t B_t is from its
  code; equation 4 has (e^(Δ_t A) − 1) / A · B_t instead.
  """
  step, log_rate, value = shared.as_float64(step, log_rate, value)
  num_heads = len(log_rate)
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )

  def update(state, at):
    delta, own = step[at], -np.exp(log_rate[at[2]])
    return np.exp(delta * own) * state + np.outer(key[at], delta * value[at])

  options["scale"] = 1.0 if scale is None else scale
  return recurrent.recurrence(update, query, value.shape[3], **options)


def mamba(
  query: ArrayLike,
  value: ArrayLike | None = None,
  *,
  norm_epsilon: float | None = None,
  **call: Any,
) -> Result:
  """S6 of inputs x, which are the queries, with the parameters of `attention.mamba`.

  Paper: arXiv:2312.00752, algorithm 2; `norm_epsilon` is that of Falcon Mamba.
  """
  names = "step_down", "step_up", "step_bias", "key_kernel", "query_kernel"
  w1, w2, bias, b, c, log_rate, skip = shared.as_float64(
    *(call.pop(name) for name in (*names, "log_rate", "skip"))
  )
  x = recurrent.zero_masked(query, call)
  value = x if value is None else recurrent.zero_masked(value, call)
  value = shared.repeat_heads(value, x.shape[2])

  def norm(x):
    if norm_epsilon is None:
      return x
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + norm_epsilon)

  delta = np.tensordot(norm(np.tensordot(x, w1, 2)), w2, 1) + bias
  step = np.logaddexp(0.0, delta)
  if value.shape[3] != x.shape[3]:  # The mean of each head's channels.
    step, log_rate, skip = (
      np.broadcast_to(
        x.mean(-1, keepdims=True), (*x.shape[:-1], value.shape[3])
      )
      for x in (step, log_rate, skip)
    )
  out = recurrent.call_packed(
    mamba_attention,
    norm(np.tensordot(x, c, 2))[:, :, None],
    norm(np.tensordot(x, b, 2))[:, :, None],
    value,
    call,
    step=step,
    log_rate=log_rate,
  )
  _, in_segment = recurrent.unmasked_positions(call, *x.shape[:2])
  return out + skip * value * in_segment[:, :, None, None]
