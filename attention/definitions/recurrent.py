"""Recurrences by definition, position by position.

`gated_linear_attention` and `delta_rule_attention` take decays and β as arguments.
Definitions of mechanisms, which compute these from `inputs` `[B, T, F]` as in their
papers, use `call_packed`; their `**call` has mask, is_causal, scale and both segment
ids.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.shared import Result

WithState = tuple[Result, Float64[np.ndarray, "B N H V"]]


def gated_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  **options: Any,
) -> Result | WithState:
  """A decaying sum of outer products.

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`. Other arguments and results are those of `delta_rule_attention`.

  Paper: arXiv:2312.06635, equation 3; arXiv:2307.08621, equation 6.
  """
  options["log_decay"] = log_decay
  return delta_rule_attention(query, key, value, beta=None, **options)


def delta_rule_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  beta: ArrayLike | None = None,
  log_decay: ArrayLike | None = None,
  erase_key: ArrayLike | None = None,
  erase_gate: ArrayLike | None = None,
  write_gate: ArrayLike | None = None,
  normalize_keys: bool = False,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> Result | WithState:
  """The delta rule: a state update that replaces the value stored for a key.

    S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t k_t (w_t ∘ v_t − S'ᵀ (b_t ∘ k_t))ᵀ
    out_t = scale · S_tᵀ q_t

  With an `erase_key` p, S_{t−1}ᵀ (b_t ∘ p_t) replaces S'ᵀ (b_t ∘ k_t).

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`; N is the largest of Q, K and U.
    beta: β, `[B, T, N]`; None is 1. Nothing is erased without β and `erase_gate`.
    log_decay: g, `[B, T, N]` or `[B, T, N, H]`; None is 0.
    erase_key: p, `[B, T, K, H]`, or None.
    erase_gate: b, `[B, T, N, H]`; None is 1.
    write_gate: w, `[B, T, N, V]`; None is 1.
    normalize_keys: whether queries and keys are normalised by `unit`.
    mask: broadcastable to `[B, 1, 1, T]`; masked positions are skipped.
    is_causal: must be True.
    scale: None is 1/√H.
    initial_state: `[B, N, H, V]`; None is 0.
    segment_ids: `[B, T]`; the state is reset to 0 where they change.
    num_segments: G; each id from 0 to G−1 has its own initial and final state,
      `[B, G, N, H, V]`, and results at masked positions are 0.
    return_state: whether to return S_T as well.

  Returns:
    `[B, T, N, V]`; with `return_state` also S_T.

  Paper: arXiv:2406.06484, equation 2; arXiv:2412.06464, equation 10;
  arXiv:2510.26692, equation 1; with `erase_key` arXiv:2506.02475, equation 9.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  erases = beta is not None or erase_gate is not None
  if normalize_keys:
    query, key = unit(query), unit(key)
  query, key, value, p = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value, key if erase_key is None else erase_key)
  )
  b, w, rate = (
    np.ones(1) if x is None else np.asarray(x, np.float64)
    for x in (erase_gate, write_gate, beta)
  )
  p, value, write_key = p * b, value * w, key * rate[..., None]
  g = decays(log_decay, query)

  def update(state, at):
    decayed = np.exp(g[at])[:, None] * state
    erase_state = decayed if erase_key is None else state
    error = value[at] - erase_state.T @ p[at] if erases else value[at]
    return decayed + np.outer(write_key[at], error)

  return recurrence(
    update,
    query,
    value.shape[3],
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
    num_segments=num_segments,
    return_state=return_state,
  )


def decays(
  log_decay: ArrayLike | None, query: ArrayLike
) -> Float64[np.ndarray, "B T N H"]:
  """The log decay of each channel; None is 0."""
  g = np.zeros(1) if log_decay is None else np.asarray(log_decay, np.float64)
  return np.broadcast_to(g[..., None] if g.ndim == 3 else g, np.shape(query))


def recurrence(
  update: Callable[[np.ndarray, tuple[int, int, int]], np.ndarray],
  query: ArrayLike,
  value_dim: int,
  *,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: ArrayLike | None = None,
  segment_ids: ArrayLike | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> Result | WithState:
  """Runs S ← `update(S, (b, t, n))`; returns out = scale · Sᵀ q, and the last S."""
  query = np.asarray(query, np.float64)
  batch, length, num_heads, head_dim = query.shape
  options = mask, is_causal, segment_ids, num_segments
  is_start, visible, segment = segment_starts(batch, length, *options)
  scale = shared.logit_scale(scale, head_dim)
  shape = num_heads, head_dim, value_dim
  state = first_state(initial_state, (batch, *shape), num_segments)
  out = np.zeros((batch, length, num_heads, value_dim))
  for b, n, t in np.ndindex(batch, num_heads, length):
    own = state[b, segment[b, t], n]
    if is_start[b, t]:
      own[:] = 0.0
    if visible[b, t]:
      own[:] = update(own, (b, t, n))
    if visible[b, t] or num_segments is None:
      out[b, t, n] = scale * (own.T @ query[b, t, n])
  state = state[:, 0] if num_segments is None else state
  return (out, state) if return_state else out


def first_state(
  initial_state: ArrayLike | None,
  shape: tuple[int, ...],
  num_segments: int | None,
) -> Float64[np.ndarray, "B G *A"]:
  """The initial states `[B, G, …]` of all segments, from one of `shape`, `[B, …]`."""
  state = np.zeros((shape[0], num_segments or 1, *shape[1:]))
  if initial_state is not None:
    state += np.asarray(initial_state, np.float64).reshape(state.shape)
  return state


def segment_starts(
  batch: int,
  length: int,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  segment_ids: ArrayLike | None = None,
  num_segments: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Describes positions by three arrays `[B, T]`.

  They are: whether a segment other than the first starts at the position, whether the
  position is visible, and the index of its state, which is its segment id with
  `num_segments` and 0 otherwise.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  visible = shared.visible_tokens(mask, batch, length)
  is_start = np.zeros((batch, length), bool)
  if num_segments is not None:
    return is_start, visible, np.asarray(segment_ids)
  if segment_ids is not None:
    is_start[:, 1:] = np.diff(segment_ids, axis=1) != 0
  return is_start, visible, np.zeros((batch, length), int)


def unmasked_positions(
  call: dict[str, Any], batch: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Two masks `[B, T]`: unmasked positions, and positions with equal segment ids."""
  in_segment = np.ones((batch, length), bool)
  if call.get("query_segment_ids") is not None:
    in_segment &= np.equal(call["query_segment_ids"], call["key_segment_ids"])
  keep = in_segment & shared.visible_tokens(call.get("mask"), batch, length)
  return keep, in_segment


def call_packed(
  function: Callable[..., Any],
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  call: dict[str, Any],
  **gates: ArrayLike | None,
) -> Result:
  """Calls a recurrence; a position whose two segment ids differ is in no segment."""
  keep, in_segment = unmasked_positions(call, *np.shape(query)[:2])
  call = {**call, **gates}
  call.pop("query_segment_ids", None)
  call["segment_ids"] = call.pop("key_segment_ids", None)
  call["mask"] = keep[:, None, None, :]
  out = function(query, key, value, **call)
  return out * in_segment[:, :, None, None]


def sigmoid(x: ArrayLike) -> np.ndarray:
  """1 / (1 + e^−x)."""
  return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


def zero_masked(x: ArrayLike, call: dict[str, Any]) -> np.ndarray:
  """Converts `x` to float64, and sets masked positions to 0, even if they are NaN."""
  x = np.asarray(x, np.float64)
  return shared.zero_masked(x, unmasked_positions(call, *x.shape[:2])[0])


def linear(
  inputs: ArrayLike, *weights: Any, call: dict[str, Any]
) -> np.ndarray:
  """Computes x W₁ W₂ … + b for the weights W₁, W₂, …, b."""
  *kernels, bias = shared.as_float64(*weights)
  x = zero_masked(inputs, call)
  for kernel in kernels:
    x = np.tensordot(x, kernel, 1)
  return x + bias


def unit(x: ArrayLike) -> np.ndarray:
  """Normalises vectors to x / √(Σ x² + 10⁻⁶), which leaves zeros unchanged."""
  x = np.asarray(x, np.float64)
  return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
