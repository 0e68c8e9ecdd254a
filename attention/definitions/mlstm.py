"""mLSTM (xLSTM) by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def mlstm_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  log_input: ArrayLike,
  epsilon: float = 0.0,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | None = None,
  initial_state: Any = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Any:
  """The ratio of a decaying sum of values and a decaying sum of ones.

    C_t = e^g_t C_{t−1} + e^i_t k_t v_tᵀ        n_t = e^g_t n_{t−1} + e^i_t k_t
    out_t = C_tᵀ q_t / (max(|n_tᵀ q_t|, 1) + ε e^m_t)        m_t = max(g_t + m_{t−1}, i_t)

  g is `log_decay` and i is `log_input`, each `[B, T, N]`, and ε is `epsilon`. Queries
  are multiplied by `scale`; None is 1/√H. The state is C e^(−m) `[B, N, H, V]`, n
  e^(−m) `[B, N, H]` and m `[B, N]`, which starts at 0. Other arguments are those of
  `delta_rule_attention`. Paper: arXiv:2405.04517, equations 19 to 21 and 25 to 27.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )
  log_decay, log_input = shared.as_float64(log_decay, log_input)
  batch, length, _, head_dim = query.shape
  query = query * shared.logit_scale(scale, head_dim)
  is_start, visible, _ = recurrent.segment_starts(
    batch, length, mask, is_causal, segment_ids
  )
  heads = batch, num_heads
  c, n, m = (
    np.zeros((*heads, head_dim, value.shape[3])),
    np.zeros((*heads, head_dim)),
    np.zeros(heads),
  )
  if initial_state is not None:
    memory, normaliser, maximum = shared.as_float64(*initial_state)
    m += maximum
    c += memory * np.exp(m)[..., None, None]
    n += normaliser * np.exp(m)[..., None]
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, h, t in np.ndindex(batch, num_heads, length):
    if is_start[b, t]:
      c[b, h], n[b, h], m[b, h] = 0.0, 0.0, 0.0
    if visible[b, t]:
      at = b, t, h
      forget, write = np.exp(log_decay[at]), np.exp(log_input[at])
      c[b, h] = forget * c[b, h] + write * np.outer(key[at], value[at])
      n[b, h] = forget * n[b, h] + write * key[at]
      m[b, h] = max(log_decay[at] + m[b, h], log_input[at])
    q = query[b, t, h]
    total = max(abs(n[b, h] @ q), 1.0) + epsilon * np.exp(m[b, h])
    out[b, t, h] = c[b, h].T @ q / total
  state = c * np.exp(-m)[..., None, None], n * np.exp(-m)[..., None], m
  return (out, state) if return_state else out


def mlstm(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  gate_soft_cap: float | None = None,
  **call: Any,
) -> Result:
  """MLSTM with the parameters of `attention.mlstm`.

  Paper: arXiv:2405.04517, equations 25 and 26; the soft cap is that of
  arXiv:2503.13427.
  """

  def gate(name):
    weights = call.pop(f"{name}_kernel"), call.pop(f"{name}_bias")
    x = recurrent.linear(inputs, *weights, call=call)
    if gate_soft_cap is None:
      return x
    return gate_soft_cap * np.tanh(x / gate_soft_cap)

  forget, write = gate("forget"), gate("input")
  return recurrent.call_packed(
    mlstm_attention,
    query,
    recurrent.zero_masked(key, call),
    recurrent.zero_masked(value, call),
    call,
    log_decay=-np.logaddexp(0.0, -forget),
    log_input=write,
  )
