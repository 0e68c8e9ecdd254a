"""Nyström attention."""

import numpy as np


def _softmax(logits):
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def iterated_inverse(matrix, iterations):
  """The paper's approximation of the pseudo-inverse, from its own norms."""
  norms = np.abs(matrix).sum(0).max() * np.abs(matrix).sum(1).max()
  z, eye = matrix.T / norms, np.eye(len(matrix))
  for _ in range(iterations):
    az = matrix @ z
    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
  return z


def nystrom_attention(
  query,
  key,
  value,
  *,
  num_landmarks,
  pinv_iterations=6,
  conv_kernel=None,
  mask=None,
  scale=None,
):
  """F · pinv(A) · (B V), for each example on its unmasked tokens alone.

  Landmarks without tokens do not exist. `conv_kernel [R, N]` filters the values
  along the sequence, masked ones zero, and adds the result.
  """
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  visible = np.ones((batch, length), bool)
  if mask is not None:
    visible &= np.asarray(mask)[:, 0, 0, :]
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n in np.ndindex(batch, num_heads):
    k = n // (num_heads // key.shape[2])
    tokens = np.flatnonzero(visible[b])
    runs = {}
    for rank, t in enumerate(tokens):
      runs.setdefault(rank * num_landmarks // len(tokens), []).append(t)
    if runs:
      queries = np.stack([query[b, run, n].mean(0) for run in runs.values()])
      keys = np.stack([key[b, run, k].mean(0) for run in runs.values()])
      f = _softmax(scale * query[b, :, n] @ keys.T)
      a = _softmax(scale * queries @ keys.T)
      to_tokens = _softmax(scale * queries @ key[b, tokens, k].T)
      inverse = iterated_inverse(a, pinv_iterations)
      out[b, :, n] = f @ inverse @ (to_tokens @ value[b, tokens, k])
    if conv_kernel is not None:
      half = len(conv_kernel) // 2
      for t, j in np.ndindex(length, len(conv_kernel)):
        s = t + j - half
        if 0 <= s < length and visible[b, s]:
          out[b, t, n] += conv_kernel[j, n] * value[b, s, k]
  return out
