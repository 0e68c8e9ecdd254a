"""RG-LRU (Griffin) by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def rg_lru_attention(
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  input_gate: ArrayLike,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Any:
  """h_t = a_t ∘ h_{t−1} + √(1 − a_t²) ∘ (i_t ∘ x_t), out = scale · h_t.

  x is `value` `[B, T, N, V]`, a is e^`log_decay` and i is `input_gate`, of the same
  shape. Other arguments are those of `delta_rule_attention`, but `scale` None is 1.
  Paper: arXiv:2402.19427, equation 4. At the first position, √(1 − a²) is replaced by
  1, as in the authors' code.
  """
  value, log_decay, gate = shared.as_float64(value, log_decay, input_gate)
  batch, length, *shape = value.shape
  is_start, visible, _ = recurrent.segment_starts(
    batch, length, mask, is_causal, segment_ids
  )
  state = recurrent.first_state(initial_state, (batch, *shape), None)[:, 0]
  out = np.zeros(value.shape)
  for b in range(batch):
    is_first = initial_state is None
    for t in range(length):
      if is_start[b, t]:
        state[b], is_first = 0.0, True
      if visible[b, t]:
        decay = np.exp(log_decay[b, t])
        weight = 1.0 if is_first else np.sqrt(1.0 - decay**2)
        state[b] = decay * state[b] + weight * gate[b, t] * value[b, t]
        is_first = False
      out[b, t] = state[b]
  out *= 1.0 if scale is None else scale
  return (out, state) if return_state else out


def rg_lru(
  query: ArrayLike, value: ArrayLike | None = None, **call: Any
) -> Result:
  """RG-LRU of inputs x, which are the queries, with the parameters of
  `attention.rg_lru`.

  Paper: arXiv:2402.19427, equations 1 to 4.
  """
  names = "decay_kernel", "decay_bias", "input_kernel", "input_bias", "log_rate"
  wa, ba, wx, bx, rate = shared.as_float64(*(call.pop(name) for name in names))
  x = recurrent.zero_masked(query, call)
  value = x if value is None else recurrent.zero_masked(value, call)
  value = shared.repeat_heads(value, x.shape[2])
  r = recurrent.sigmoid(np.einsum("btnh,nhk->btnk", x, wa) + ba)
  i = recurrent.sigmoid(np.einsum("btnh,nhk->btnk", x, wx) + bx)
  log_decay = -8.0 * np.logaddexp(0.0, rate) * r
  if value.shape[3] != x.shape[3]:  # The mean of each head's channels.
    log_decay, i = (
      np.broadcast_to(g.mean(-1, keepdims=True), value.shape)
      for g in (log_decay, i)
    )
  keep, in_segment = recurrent.unmasked_positions(call, *x.shape[:2])
  out = rg_lru_attention(
    value,
    log_decay=log_decay,
    input_gate=i,
    mask=keep[:, None, None, :],
    is_causal=call.get("is_causal", True),
    scale=call.get("scale"),
    segment_ids=call.get("key_segment_ids"),
  )
  return out * in_segment[:, :, None, None]
