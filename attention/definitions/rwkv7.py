"""RWKV-7 by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.recurrent import WithState
from attention.definitions.shared import Result


def rwkv7_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  removal: ArrayLike,
  replacement: ArrayLike,
  **options: Any,
) -> Result | WithState:
  """S_t = diag(e^g_t) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ, out = scale · Sᵀ q.

  g is `log_decay`, a is `removal` and b is `replacement`, each `[B, T, N, H]`. Other
  arguments are those of `delta_rule_attention`. Paper: arXiv:2503.14456, equation 17.
  """
  num_heads = np.shape(query)[2]
  g, a, b = shared.as_float64(log_decay, removal, replacement)
  key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (key, value)
  )

  def update(state, at):
    change = np.outer(b[at], state.T @ a[at]) + np.outer(key[at], value[at])
    return np.exp(g[at])[:, None] * state + change

  return recurrent.recurrence(update, query, value.shape[3], **options)


def rwkv7(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  scale: float | None = None,
  **call: Any,
) -> Result:
  """RWKV-7 with its bonus, from the parameters of `attention.rwkv7`.

  Paper: arXiv:2503.14456, section 4.
  """
  p = {
    name: np.asarray(call.pop(name), np.float64)
    for name in [
      *("decay_down", "decay_up", "decay_bias", "rate_down", "rate_up"),
      *("rate_bias", "removal_scale", "rate_share", "bonus"),
    ]
  }
  heads = len(p["bonus"])
  x = np.tanh(
    recurrent.linear(inputs, p["decay_down"], np.zeros(()), call=call)
  )
  decay = np.tensordot(x, p["decay_up"], 1) + p["decay_bias"]
  rates = p["rate_down"], p["rate_up"], p["rate_bias"]
  rate = recurrent.sigmoid(recurrent.linear(inputs, *rates, call=call))
  key, value = (
    shared.repeat_heads(recurrent.zero_masked(x, call), heads)
    for x in (key, value)
  )
  removal = recurrent.unit(p["removal_scale"] * key)
  key = key * (1.0 + (rate - 1.0) * p["rate_share"])
  call["scale"] = 1.0 if scale is None else scale
  out = recurrent.call_packed(
    rwkv7_attention,
    query,
    key,
    value,
    call,
    log_decay=-np.exp(-0.5) * recurrent.sigmoid(decay),
    removal=-removal,
    replacement=rate * removal,
  )
  _, in_segment = recurrent.unmasked_positions(call, *np.shape(query)[:2])
  scaled_query = np.asarray(query, np.float64) * p["bonus"]
  bonus = np.sum(scaled_query * key, axis=-1, keepdims=True) * value
  return out + bonus * in_segment[:, :, None, None]
