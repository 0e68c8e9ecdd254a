"""DeltaProduct by definition: R delta-rule updates of a state at each position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.recurrent import WithState
from attention.definitions.shared import Result


def delta_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike,
  log_decay: ArrayLike | None = None,
  normalize_keys: bool = False,
  **options: Any,
) -> Result | WithState:
  """Applies S ← S + β_r k_r (v_r − Sᵀ k_r)ᵀ for r = 1 … R, after one decay.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, R, K, H]`.
    value: `[B, T, R, K, V]`.
    beta: `[B, T, R, N]`.

  Other arguments are those of `delta_rule_attention`. Paper: arXiv:2502.10297, equation
  3.
  """
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  repeats = np.shape(query)[2] // np.shape(key)[3]
  beta, key, value = shared.as_float64(beta, key, value)
  key, value = (np.repeat(x, repeats, axis=3) for x in (key, value))
  g = recurrent.decays(log_decay, query)

  def update(state, at):
    b, t, n = at
    state = np.exp(g[at])[:, None] * state
    for r in range(key.shape[2]):
      k = key[b, t, r, n]
      error = value[b, t, r, n] - state.T @ k
      state = state + beta[b, t, r, n] * np.outer(k, error)
    return state

  return recurrent.recurrence(update, query, value.shape[4], **options)


def delta_product(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  other_key_kernel: ArrayLike,
  other_value_kernel: ArrayLike,
  max_rate: float = 2.0,
  num_householder: int = 2,
  **call: Any,
) -> Result:
  """Gated DeltaProduct: the last of R keys is `key`, the others come from `inputs`.

  Values whose width is not V are used only in the last update. Paper: arXiv:2502.10297,
  section 3.
  """

  def project(kernel):
    x = recurrent.linear(inputs, kernel, np.zeros(()), call=call)
    return x * recurrent.sigmoid(x)

  def append(others, x):
    x = shared.repeat_heads(recurrent.zero_masked(x, call), others.shape[3])
    if others.shape[-1] != x.shape[-1]:
      others = np.zeros((*others.shape[:-1], x.shape[-1]))
    return np.concatenate([others, x[:, :, None]], axis=2)

  steps = recurrent.linear(inputs, step_kernel, step_bias, call=call)
  rates = recurrent.linear(inputs, rate_kernel, np.zeros(()), call=call)
  assert rates.shape[2] == num_householder
  rate = np.exp(np.asarray(log_rate, np.float64))
  return recurrent.call_packed(
    delta_product_attention,
    recurrent.unit(query),
    recurrent.unit(append(project(other_key_kernel), key)),
    append(project(other_value_kernel), value),
    call,
    beta=max_rate * recurrent.sigmoid(rates),
    log_decay=-rate * np.logaddexp(0.0, steps),
  )
