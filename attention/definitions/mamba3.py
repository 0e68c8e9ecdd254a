"""Mamba-3 by definition, position by position."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import recurrent, shared
from attention.definitions.shared import Result


def mamba3(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  inputs: ArrayLike,
  is_causal: bool = True,
  scale: float | None = None,
  rotary_fraction: float = 0.5,
  **call: Any,
) -> Result:
  """Mamba-3 (SISO); `call` includes the parameters of `attention.mamba3`.

  Paper: arXiv:2603.15569, sections 3.1 and 3.2.
  """
  if not is_causal:
    raise ValueError("is_causal: expected True, got False")
  names = "step_kernel", "step_bias", "decay_kernel", "trapezoid_kernel"
  others = "angle_kernel", "query_bias", "key_bias", "skip"
  w, b, a, m, phi, query_bias, key_bias, skip = shared.as_float64(
    *(call.pop(name) for name in (*names, *others))
  )
  batch, length, num_heads, head_dim = np.shape(query)
  assert phi.shape[1] == int(head_dim * rotary_fraction) // 2

  def project(kernel):
    return recurrent.linear(inputs, kernel, np.zeros(()), call=call)

  step = np.logaddexp(0.0, project(w) + b)
  decay = np.exp(-step * np.maximum(np.logaddexp(0.0, project(a)), 1e-4))
  mix = recurrent.sigmoid(project(m))
  rotation = np.pi * np.tanh(project(phi))[:, :, None] * step[..., None]
  query = np.asarray(query, np.float64) + query_bias
  key, value = (
    shared.repeat_heads(recurrent.zero_masked(x, call), num_heads)
    for x in (key, value)
  )
  key = key + key_bias
  scale = 1.0 if scale is None else scale
  keep, in_segment = recurrent.unmasked_positions(call, batch, length)
  ids = call.get("key_segment_ids")
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for i, n in np.ndindex(batch, num_heads):
    state = np.zeros((head_dim, value.shape[3]))
    update, angle = np.zeros_like(state), np.zeros(phi.shape[1])
    for t in range(length):
      if t and ids is not None and ids[i, t] != ids[i, t - 1]:
        state, update = 0.0 * state, 0.0 * state
      if keep[i, t]:
        angle = angle + rotation[i, t, n]
        previous, update = (
          update,
          np.outer(_rotate(key[i, t, n], angle), value[i, t, n]),
        )
        d = step[i, t, n]
        state = decay[i, t, n] * (state + (1 - mix[i, t, n]) * d * previous)
        state = state + mix[i, t, n] * d * update
      result = state.T @ _rotate(query[i, t, n], angle)
      out[i, t, n] = scale * result + skip[n] * value[i, t, n]
  return out * in_segment[:, :, None, None]


def _rotate(x, angle):
  """Rotates leading pairs of neighbouring features, as complex numbers, by `angle`."""
  size = 2 * len(angle)
  z = (x[:size:2] + 1j * x[1:size:2]) * np.exp(1j * angle)
  return np.concatenate([np.stack([z.real, z.imag], -1).ravel(), x[size:]])
