"""TTT-Linear by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def ttt_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  learning_rate: ArrayLike,
  initial_weights: ArrayLike,
  initial_bias: ArrayLike,
  norm_scale: ArrayLike,
  norm_bias: ArrayLike,
  position_offset: ArrayLike | None = None,
  minibatch_size: int = 16,
  epsilon: float = 1e-6,
  mask: ArrayLike | None = None,
  is_causal: bool = True,
  scale: float | ArrayLike | None = None,
  initial_state: Any = None,
  segment_ids: ArrayLike | None = None,
  return_state: bool = False,
) -> Any:
  """A linear model that gradient descent fits to keys and values.

    ℓ_s(W, b) = ½ |LN(k_s W + b) + k_s − v_s|²
    (W_t, b_t) = (W, b) − c_i Σ_s η_s ∇ℓ_s(W, b)        c_i = max(1/i + o_i, 0)
    out_t = q_t + LN(q_t W_t + b_t)

  (W, b) are the weights before the mini-batch of `minibatch_size` visible positions. t
  is its position number i, and s are its positions up to t. η is `learning_rate` `[B,
  T, N]`, and o is `position_offset` `[C]`; None is 0. Queries are multiplied by
  `scale`; None is 1. Results at masked positions are 0. The state is the change of [W;
  b] since the first position, and Σ η ∇ and the number of positions of the last
  mini-batch. Paper: arXiv:2407.04620, sections 2.3 to 2.5, and its code.
  """
  num_heads = max(np.shape(x)[2] for x in (query, key, value))
  query, key, value = (
    shared.repeat_heads(np.asarray(x, np.float64), num_heads)
    for x in (query, key, value)
  )
  query = query * (1.0 if scale is None else scale)
  weights, bias, gamma, beta, eta = shared.as_float64(
    initial_weights, initial_bias, norm_scale, norm_bias, learning_rate
  )
  rates = 1.0 / np.arange(1, minibatch_size + 1)
  if position_offset is not None:
    rates = np.maximum(rates + np.asarray(position_offset, np.float64), 0.0)
  batch, length, _, head_dim = query.shape
  is_start, visible, _ = recurrent.segment_starts(
    batch, length, mask, is_causal, segment_ids
  )
  change = np.zeros((batch, num_heads, head_dim + 1, head_dim))
  gradient, count = np.zeros_like(change), np.zeros(batch, np.int32)
  if initial_state is not None:
    change, gradient = (np.array(x, np.float64) for x in initial_state[:2])
    count = np.array(initial_state[2])
  first = np.concatenate([weights, bias[:, None]], axis=1)
  out = np.zeros(value.shape)

  def normalize(z):
    deviation = z - z.mean()
    spread = np.sqrt(np.mean(deviation**2) + epsilon)
    return deviation / spread, spread

  for b, t in np.ndindex(batch, length):
    if is_start[b, t]:
      change[b], gradient[b], count[b] = 0.0, 0.0, 0
    if not visible[b, t]:
      continue
    if count[b] == minibatch_size:
      change[b] -= rates[-1] * gradient[b]
      gradient[b], count[b] = 0.0, 0
    count[b] += 1
    for n in range(num_heads):
      k, model = np.append(key[b, t, n], 1.0), first[n] + change[b, n]
      x, spread = normalize(k @ model)
      error = gamma[n] * x + beta[n] + key[b, t, n] - value[b, t, n]
      d = gamma[n] * error
      d = (d - d.mean() - x * np.mean(d * x)) / spread
      gradient[b, n] += eta[b, t, n] * np.outer(k, d)
      updated = model - rates[count[b] - 1] * gradient[b, n]
      x, _ = normalize(np.append(query[b, t, n], 1.0) @ updated)
      out[b, t, n] = query[b, t, n] + gamma[n] * x + beta[n]
  return (out, (change, gradient, count)) if return_state else out


def ttt_linear(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  rate_kernel: ArrayLike,
  rate_bias: ArrayLike,
  base_rate: float = 1.0,
  **call: Any,
) -> Result:
  """TTT-Linear with η = `base_rate` · σ(inputs · W + b) / H.

  W is `rate_kernel` `[F, N]` and b is `rate_bias` `[N]`. Paper: arXiv:2407.04620,
  section 2.7, and its code.
  """
  rates = recurrent.linear(inputs, rate_kernel, rate_bias, call=call)
  rates = base_rate * recurrent.sigmoid(rates) / np.shape(query)[3]
  return recurrent.call_packed(
    ttt_linear_attention, query, key, value, call, learning_rate=rates
  )
