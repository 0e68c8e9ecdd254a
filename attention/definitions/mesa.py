"""MesaNet, position by position, with an exact linear solve for each query."""

from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def mesa_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  beta: ArrayLike,
  regularizer: ArrayLike,
  normalize_keys: bool = False,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  **options: Any,
) -> Result | tuple[Result, Float64[np.ndarray, "B N H X"]]:
  """Ridge regression from keys to values, with decaying weights.

    S_kk ← e^g_t S_kk + β_t k_t k_tᵀ        S_kv ← e^g_t S_kv + β_t k_t v_tᵀ
    out_t = scale · S_kvᵀ (S_kk + diag(λ))⁻¹ q_t

  with λ = `regularizer` `[N, H]`. `scale` None is 1; states are [S_kk, S_kv]
  `[B, N, H, H+V]`. Other arguments are those of `delta_rule_attention`.

  Paper: arXiv:2506.05233.
  """
  if normalize_keys:
    query, key = recurrent.unit(query), recurrent.unit(key)
  arrays = query, key, value, log_decay, beta, regularizer
  query, key, value, g, beta, ridge = shared.as_float64(*arrays)
  options["num_segments"] = num_segments
  is_start, visible, segment = recurrent.segment_starts(
    *query.shape[:2], **options
  )
  batch, length, num_heads, head_dim = query.shape
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)
  width = head_dim + value.shape[3]
  shape = batch, num_heads, head_dim, width
  state = recurrent.first_state(initial_state, shape, num_segments)
  query = query * (1.0 if scale is None else scale)
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    own = state[b, segment[b, t], n]
    if is_start[b, t]:
      own[:] = 0.0
    if visible[b, t]:
      k, v = key[b, t, n], value[b, t, n]
      update = beta[b, t, n] * np.outer(k, np.concatenate([k, v]))
      own[:] = np.exp(g[b, t, n]) * own + update
    s_kk, s_kv = own[:, :head_dim], own[:, head_dim:]
    x = np.linalg.solve(s_kk + np.diag(ridge[n]), query[b, t, n])
    if visible[b, t] or num_segments is None:
      out[b, t, n] = s_kv.T @ x
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def mesa(query: ArrayLike, key: ArrayLike, value: Any, **rest: Any) -> Result:
  """MesaNet: β = σ(inputs · W_β + b_β) and e^g = σ(inputs · W_g + b_g).

  `inputs` is `[B, T, F]`, W_β is `rate_kernel` `[F, N]`, W_g is `decay_kernel`, biases
  are `[N]`, and λ = `min_regularizer` + softplus(`regularizer`). Queries and keys are
  normalised to length 1. Paper: arXiv:2506.05233, section 2, equations 4 to 8.
  """
  names = ("inputs", "decay_kernel", "decay_bias", "rate_kernel", "rate_bias")
  inputs, *weights = (rest.pop(name) for name in names)
  ridge, minimum = rest.pop("regularizer"), rest.pop("min_regularizer", 0.25)
  decays = recurrent.linear(inputs, *weights[:2], call=rest)
  rates = recurrent.linear(inputs, *weights[2:], call=rest)
  query, key = (
    recurrent.unit(query),
    recurrent.unit(recurrent.zero_masked(key, rest)),
  )
  gates = {"log_decay": -np.logaddexp(0.0, -decays)}
  gates["beta"] = recurrent.sigmoid(rates)
  gates["regularizer"] = minimum + np.logaddexp(0.0, ridge)
  return recurrent.call_packed(mesa_attention, query, key, value, rest, **gates)
