"""Gated linear attention and the delta rule, position by position."""

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def gated_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> (
  Float64[np.ndarray, "B T N V"]
  | tuple[Float64[np.ndarray, "B T N V"], Float64[np.ndarray, "B N H V"]]
):
  """A state that decays, to which every position adds.

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`; query head n reads key head n // (N/K).
    value: `[B, T, K, V]`.
    log_decay: g, `[B, T, N]` or `[B, T, N, H]`.
    mask: boolean, broadcastable to `[B, 1, 1, T]`; a hidden position is skipped.
    is_causal: must be True.
    scale: None is 1/√H.
    initial_state: `[B, N, H, V]`; None is 0.
    segment_ids: `[B, T]`; the state is 0 again where they change.
    return_state: whether to return S_T as well.

  Returns:
    `[B, T, N, V]` float64, and the state.

  Paper: arXiv:2312.06635, equation 3; arXiv:2307.08621, equation 6.
  """
  rest = mask, is_causal, scale, initial_state, segment_ids, return_state
  return _recurrent(query, key, value, log_decay, None, *rest)


def delta_rule_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike,
  log_decay: ArrayLike | None = None,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> (
  Float64[np.ndarray, "B T N V"]
  | tuple[Float64[np.ndarray, "B T N V"], Float64[np.ndarray, "B N H V"]]
):
  """A state that replaces what it has for a key.

    S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        out_t = scale · S_tᵀ q_t

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`; query head n reads key head n // (N/K).
    value: `[B, T, K, V]`.
    beta: β, `[B, T, N]`.
    log_decay: g, `[B, T, N]` or `[B, T, N, H]`; None is 0.
    mask: boolean, broadcastable to `[B, 1, 1, T]`; a hidden position is skipped.
    is_causal: must be True.
    scale: None is 1/√H.
    initial_state: `[B, N, H, V]`; None is 0.
    segment_ids: `[B, T]`; the state is 0 again where they change.
    return_state: whether to return S_T as well.

  Returns:
    `[B, T, N, V]` float64, and the state.

  Paper: arXiv:2406.06484, equation 2; arXiv:2412.06464, equation 10;
  arXiv:2510.26692, equation 1.
  """
  if log_decay is None:
    log_decay = np.zeros(np.shape(query)[:3])
  rest = mask, is_causal, scale, initial_state, segment_ids, return_state
  return _recurrent(query, key, value, log_decay, beta, *rest)


def _recurrent(
  query,
  key,
  value,
  log_decay,
  beta,
  mask,
  is_causal,
  scale,
  initial_state,
  segment_ids,
  return_state,
):
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  query, key, value, g = shared.as_float64(query, key, value, log_decay)
  batch, length, num_heads, head_dim = query.shape
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)
  if g.ndim == 3:
    g = np.repeat(g[..., None], head_dim, axis=3)
  keep = shared.visible_tokens(mask, batch, length)
  factor = shared.logit_scale(scale, head_dim)
  state = np.zeros((batch, num_heads, head_dim, value.shape[3]))
  if initial_state is not None:
    state = state + np.asarray(initial_state, np.float64)
  begins = np.zeros((batch, length), bool)
  if segment_ids is not None:
    begins[:, 1:] = np.diff(segment_ids, axis=1) != 0
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, n in np.ndindex(batch, num_heads):
    s = state[b, n]
    for t in range(length):
      if begins[b, t]:
        s = np.zeros_like(s)
      if keep[b, t]:
        s = np.exp(g[b, t, n])[:, None] * s
        k, v = key[b, t, n], value[b, t, n]
        if beta is not None:
          v = np.asarray(beta)[b, t, n] * (v - s.T @ k)
        s = s + np.outer(k, v)
      out[b, t, n] = factor * (s.T @ query[b, t, n])
    state[b, n] = s
  return (out, state) if return_state else out
