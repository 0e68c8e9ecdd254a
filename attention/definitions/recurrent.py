"""Recurrences, position by position: gated linear attention, delta rules, and
mechanisms.

`gated_linear_attention` and `delta_rule_attention` take decays and β as arguments. The
other functions compute them from `inputs` `[B, T, F]` as in their papers; their
`**call` has mask, is_causal, scale and both segment ids.
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


def retention(
  query: ArrayLike, key: ArrayLike, value: ArrayLike, **call: Any
) -> Result:
  """RetNet: head n decays by 1 − 2^(−5−n).

  Paper: arXiv:2307.08621, equation 8.
  """
  decay = np.log(1.0 - 2.0 ** (-5.0 - np.arange(np.shape(query)[2])))
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return call_packed(
    delta_rule_attention, query, key, value, call, log_decay=decay
  )


def lightning(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  depth: float = 0.0,
  slopes: str = "alibi",
  **call: Any,
) -> Result:
  """MiniMax-01: head n of N decays by exp(−2^(−8(n+1)/N) · (1 − depth + 10⁻⁵)).

  Paper: arXiv:2501.08313, section 2.2, for N a power of two. For other N, heads beyond
  the largest power of two P ≤ N have every other slope of 2P heads, as in ALiBi. With
  `slopes` 'geometric', as in transformers, the formula is the same for any N.
  """
  num_heads = np.shape(query)[2]
  power = 1 << (num_heads.bit_length() - 1)
  if slopes == "geometric":
    power = num_heads
  rates = [
    2.0
    ** (
      -8 * (n + 1) / power if n < power else -4 * (2 * (n - power) + 1) / power
    )
    for n in range(num_heads)
  ]
  decay = -np.array(rates) * (1.0 - depth + 1e-5)
  decay = np.broadcast_to(decay, np.shape(query)[:3])
  return call_packed(
    delta_rule_attention, query, key, value, call, log_decay=decay
  )


def gated_linear(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  gate_down: ArrayLike,
  gate_up: ArrayLike,
  gate_bias: ArrayLike,
  temperature: float = 16.0,
  **call: Any,
) -> Result:
  """GLA: decays σ(inputs · W₁ W₂ + b)^(1/temperature) per channel.

  W₁ is `gate_down` `[F, R]`, W₂ is `gate_up` `[R, N, H]` and b is `gate_bias` `[N, H]`.
  Paper: arXiv:2312.06635, section 4.4.
  """
  gates = linear(inputs, gate_down, gate_up, gate_bias, call=call)
  decay = -np.logaddexp(0.0, -gates) / temperature
  return call_packed(
    delta_rule_attention, query, key, value, call, log_decay=decay
  )


def hgrn2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  lower_bound: float = 0.0,
  scale: float | None = None,
  **call: Any,
) -> Result:
  """HGRN2: `key` has the logits of the forget gates f, and the keys are 1 − f.

    f_t = γ + (1 − γ) σ(k_t)        S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ

  Queries are q σ(q). γ is `lower_bound`, and `scale` None is 1.
  Paper: arXiv:2404.07904, section 3.
  """
  query = np.asarray(query, np.float64)
  query = query * sigmoid(query)
  key = shared.repeat_heads(zero_masked(key, call), query.shape[2])
  forget = lower_bound + (1.0 - lower_bound) * sigmoid(key)
  call["scale"] = 1.0 if scale is None else scale
  return call_packed(
    delta_rule_attention,
    query,
    1.0 - forget,
    value,
    call,
    log_decay=np.log(forget),
  )


def mamba2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  skip: ArrayLike,
  scale: float | None = None,
  projection_bias: ArrayLike = 0.0,
  step_factor: float = 1.0,
  min_step: float = 0.0,
  max_step: float | None = None,
  rule: Callable[..., Any] = delta_rule_attention,
  **call: Any,
) -> Result:
  """Mamba-2 (SSD): the state update is Δ_t k_t v_tᵀ, and D v_t is added to the result.

  Δ = softplus(`step_factor` (inputs · `step_kernel` `[F, N]` + `projection_bias` `[N]`)
  + `step_bias` `[N]`), clipped to `min_step` and `max_step`; the decay is
  e^(−Δ e^log_rate) with `log_rate` `[N]`, and D is `skip` `[N]`. `scale` None is 1.
  `rule` is for log-linear attention, which builds on this function.
  Paper: arXiv:2405.21060, section 7; its C, B and x are query, key and value.
  """
  rate, skip, bias = shared.as_float64(log_rate, skip, step_bias)
  logits = linear(inputs, step_kernel, projection_bias, call=call)
  step = np.logaddexp(0.0, step_factor * logits + bias)
  step = np.clip(step, min_step, max_step)
  key, value = (
    shared.repeat_heads(zero_masked(x, call), len(rate)) for x in (key, value)
  )
  call["scale"] = 1.0 if scale is None else scale
  scaled_value = value * step[..., None]
  decay = -np.exp(rate) * step
  out = call_packed(rule, query, key, scaled_value, call, log_decay=decay)
  return out + skip[:, None] * value


def delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  max_rate: float = 1.0,
  log_decay: ArrayLike | None = None,
  **call: Any,
) -> Result:
  """DeltaNet: queries and keys of unit length, β = max_rate · σ(inputs · W_β).

  W_β is `rate_kernel` `[F, N]`; `log_decay` is for functions that build on this one.
  Paper: arXiv:2406.06484, section 3.3.
  """
  rates = linear(inputs, rate_kernel, np.zeros(()), call=call)
  beta = max_rate * sigmoid(rates)
  gates = {"beta": beta, "log_decay": log_decay}
  query, key = unit(query), unit(zero_masked(key, call))
  return call_packed(delta_rule_attention, query, key, value, call, **gates)


def gated_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  **rest: Any,
) -> Result:
  """Gated DeltaNet: `delta` with the decays per head of `mamba2`.

  Paper: arXiv:2412.06464, equation 10.
  """
  step = np.logaddexp(0.0, linear(inputs, step_kernel, step_bias, call=rest))
  rate = np.exp(np.asarray(log_rate, np.float64))
  decay = -rate.reshape(-1, *[1] * (step.ndim - 3)) * step
  return delta(query, key, value, inputs=inputs, log_decay=decay, **rest)


def kimi_delta(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  step_down: ArrayLike,
  step_up: ArrayLike,
  lower_bound: float | None = None,
  **rest: Any,
) -> Result:
  """Kimi Delta Attention: `gated_delta` with decays per channel.

  Its `step_kernel` is `step_down` `[F, R]` times `step_up` `[R, N, H]`, and its
  `step_bias` is `[N, H]`. With a bound L, log decays are L · sigmoid(e^A (x·W + b)).
  Paper: arXiv:2510.26692, section 4.
  """
  down, up = shared.as_float64(step_down, step_up)
  kernel = np.tensordot(down, up, 1)
  if lower_bound is None:
    return gated_delta(query, key, value, step_kernel=kernel, **rest)
  bias, log_rate = rest.pop("step_bias"), rest.pop("log_rate")
  steps = linear(rest["inputs"], kernel, bias, call=rest)
  rate = np.exp(np.asarray(log_rate, np.float64))[:, None]
  decay = lower_bound * sigmoid(rate * steps)
  return delta(query, key, value, log_decay=decay, **rest)


def comba(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  step_kernel: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  feedback: ArrayLike,
  correction: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Result:
  """Comba: `gated_delta` that erases σ(a) k before the decay and reads with q − d k.

    S_t = S_{t−1}(α_t − σ(a) β_t k_t k_tᵀ) + β_t v_t k_tᵀ        out = S_t (q_t − d k_t)

  in the paper's notation, in which S is the transpose of ours. a is `feedback` `[N]`
  and d is `correction` `[N]`. Paper: arXiv:2506.02475, table 1, equations 9 and 10.
  """
  step = np.logaddexp(0.0, linear(inputs, step_kernel, step_bias, call=call))
  rates = linear(inputs, rate_kernel, np.zeros(()), call=call)
  a, d, log_rate = shared.as_float64(feedback, correction, log_rate)
  key = shared.repeat_heads(unit(zero_masked(key, call)), len(a))
  value = shared.repeat_heads(zero_masked(value, call), len(a))
  return call_packed(
    delta_rule_attention,
    unit(query) - d[:, None] * key,
    key,
    value,
    call,
    beta=max_rate * sigmoid(rates),
    log_decay=-np.exp(log_rate) * step,
    erase_key=sigmoid(a)[:, None] * key,
  )


def gated_delta_2(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  erase_kernel: ArrayLike,
  write_kernel: ArrayLike,
  step_down: ArrayLike,
  step_up: ArrayLike,
  step_bias: ArrayLike,
  log_rate: ArrayLike,
  max_rate: float = 1.0,
  **call: Any,
) -> Result:
  """Gated DeltaNet-2: b = max_rate · σ(inputs · W_b) and w = σ(inputs · W_w).

  W_b is `erase_kernel` `[F, N, H]` and W_w is `write_kernel` `[F, N, V]`; values whose
  width is not V use the mean of w. Decays are those of `kimi_delta`. Paper:
  arXiv:2605.22791.
  """
  step = linear(inputs, step_down, step_up, step_bias, call=call)
  rate = np.exp(np.asarray(log_rate, np.float64))[:, None]
  write = sigmoid(linear(inputs, write_kernel, np.zeros(()), call=call))
  if write.shape[3] != np.shape(value)[3]:
    write = write.mean(axis=3, keepdims=True)
  return call_packed(
    delta_rule_attention,
    unit(query),
    unit(zero_masked(key, call)),
    value,
    call,
    log_decay=-rate * np.logaddexp(0.0, step),
    erase_gate=max_rate
    * sigmoid(linear(inputs, erase_kernel, np.zeros(()), call=call)),
    write_gate=write,
  )


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
