"""Nyström attention (Xiong et al., 2021), as the paper defines it."""

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def iterated_inverse(
  matrix: np.ndarray, iterations: int, norm: float | None = None
) -> np.ndarray:
  """Computes A⁺ by the paper's iteration of order 3.

  Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞),    Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z)))

  If `norm` is given, it replaces ‖A‖₁.
  """
  A, eye = matrix, np.eye(len(matrix))
  largest = np.linalg.norm(A, 1) if norm is None else norm
  Z = A.T / (largest * np.linalg.norm(A, np.inf))
  for _ in range(iterations):
    AZ = A @ Z
    Z = Z @ (13 * eye - AZ @ (15 * eye - AZ @ (7 * eye - AZ))) / 4
  return Z


def landmark_runs(tokens: np.ndarray, num_landmarks: int) -> list[np.ndarray]:
  """Splits n tokens into L runs: the token of rank r is in run floor(r·L/n).

  Empty runs, which exist if L > n, are omitted.
  """
  run = np.arange(len(tokens)) * num_landmarks // max(len(tokens), 1)
  return [tokens[run == i] for i in np.unique(run)]


def nystrom_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  num_landmarks: int,
  pinv_iterations: int = 6,
  shared_start: bool = False,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
) -> shared.Result:
  """Attention through landmarks, the means Q̃ and K̃ of runs of tokens.

    F = softmax(scale · Q K̃ᵀ),  A = softmax(scale · Q̃ K̃ᵀ)
    B = softmax(scale · Q̃ Kᵀ),  out = F · A⁺ · (B V)

  with the A⁺ of `iterated_inverse` and the runs of `landmark_runs`. Runs and the keys
  of B exclude masked tokens; rows of F include masked queries. If all tokens of an
  example are masked, its results are zeros.

  Args:
    num_landmarks: L.
    pinv_iterations: the number of iterations for A⁺.
    shared_start: whether Z₀ of all matrices has the largest ‖A‖₁ in the batch.
    mask: key mask, broadcastable to `[B, 1, 1, S]`.
    is_causal: must be False, because landmarks include later tokens.
    scale: factor of the logits; None is 1/√H.

  Paper: Nyströmformer, sections 3.2 and 3.3, arXiv:2102.03902.
  """
  shared.check_both_directions(query, key, is_causal)
  query, key, value = shared.as_float64(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  scale = shared.logit_scale(scale, head_dim)
  visible = shared.visible_tokens(mask, batch, length)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  products = {}
  for b, n in np.ndindex(batch, num_heads):
    k = n // (num_heads // key.shape[2])
    tokens = np.flatnonzero(visible[b])
    if not len(tokens):
      continue
    Q, K, V = query[b, :, n], key[b, tokens, k], value[b, tokens, k]
    runs = landmark_runs(tokens, num_landmarks)
    Q_means = np.stack([query[b, run, n].mean(0) for run in runs])
    K_means = np.stack([key[b, run, k].mean(0) for run in runs])
    F = shared.softmax(scale * Q @ K_means.T)
    A = shared.softmax(scale * Q_means @ K_means.T)
    B = shared.softmax(scale * Q_means @ K.T)
    products[b, n] = F, A, B @ V
  norms = [float(np.linalg.norm(A, 1)) for _, A, _ in products.values()]
  norm = max(norms, default=1.0) if shared_start else None
  for (b, n), (F, A, BV) in products.items():
    out[b, :, n] = F @ iterated_inverse(A, pinv_iterations, norm) @ BV
  return out


def depthwise_convolution(
  value: ArrayLike, kernel: ArrayLike, *, mask: ArrayLike | None = None
) -> shared.Result:
  """The convolution of values along the sequence that the paper's code adds.

    out[t] = Σ_j kernel[j, n] · v_{t + j − ⌊R/2⌋}        over visible positions

  with `kernel` `[R, N]`, R odd, one filter per query head.
  """
  value, kernel = shared.as_float64(value, kernel)
  size, num_heads = kernel.shape
  length = value.shape[1]
  visible = shared.visible_tokens(mask, *value.shape[:2])
  value = shared.repeat_heads(shared.zero_masked(value, visible), num_heads)
  before, after = size // 2, (size - 1) // 2
  value = np.pad(value, [(0, 0), (before, after), (0, 0), (0, 0)])
  terms = [kernel[j, :, None] * value[:, j : j + length] for j in range(size)]
  return np.sum(terms, axis=0)
