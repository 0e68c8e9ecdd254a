"""What definitions share: who sees whom, one softmax, tables by distance."""

from collections.abc import Callable

from jaxtyping import Bool, Float64
import numpy as np
from numpy.typing import ArrayLike


def as_float64(*arrays: ArrayLike) -> list[np.ndarray]:
  """The arrays as float64 NumPy arrays."""
  return [np.asarray(array, np.float64) for array in arrays]


def repeat_heads(array: np.ndarray, num_heads: int) -> np.ndarray:
  """`[B, S, K, …]` → `[B, S, N, …]`: query head n reads head n // (N/K)."""
  return np.repeat(array, num_heads // array.shape[2], axis=2)


def visible_pairs(
  shape: tuple[int, int, int, int],
  *,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Bool[np.ndarray, "B N T S"]:
  """The pairs that the options of a call leave, for any mechanism.

  Args:
    shape: (B, N, T, S).
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Raises:
    ValueError: only one of the two segment ids is given, or `mask` does not
      broadcast to `shape`.
  """
  visible = np.ones(shape, bool)
  if mask is not None:
    visible &= np.asarray(mask)
  if is_causal:
    visible &= np.tri(*shape[2:], dtype=bool)
  if (query_segment_ids is None) != (key_segment_ids is None):
    raise ValueError(
      "query_segment_ids, key_segment_ids: expected both or neither, got one"
    )
  if query_segment_ids is not None:
    of_queries = np.asarray(query_segment_ids)[:, None, :, None]
    of_keys = np.asarray(key_segment_ids)[:, None, None, :]
    visible &= of_queries == of_keys
  return visible


def visible_tokens(
  mask: ArrayLike | None, batch: int, length: int
) -> Bool[np.ndarray, "B S"]:
  """The tokens that a mask leaves which is the same for all queries and heads.

  Args:
    mask: boolean, True = attend, broadcastable to `[B, 1, 1, S]`, or None.
    batch: B.
    length: S.

  Raises:
    ValueError: `mask` does not broadcast to `[B, 1, 1, S]`.
  """
  mask = np.asarray(True if mask is None else mask)
  return np.broadcast_to(mask, (batch, 1, 1, length))[:, 0, 0]


def logit_scale(scale: float | ArrayLike | None, head_dim: int) -> np.ndarray:
  """The factor of the logits; None is 1/√H."""
  return np.asarray(head_dim**-0.5 if scale is None else scale)


def softmax(logits: np.ndarray, sink: float = -np.inf) -> np.ndarray:
  """exp(x_s) / (exp(sink) + Σ_r exp(x_r)) along the last axis.

  Zeros where all x are −∞, and nothing where there are none.
  """
  largest = logits.max(-1, keepdims=True, initial=sink)
  # The largest is subtracted, which changes nothing but the range of floats.
  weights = np.exp(logits - np.where(largest == -np.inf, 0, largest))
  total = weights.sum(-1, keepdims=True)
  if sink > -np.inf:
    total = total + np.exp(sink - largest)
  return weights / np.where(total == 0, 1, total)


def forget_of_visible(
  log_forget: ArrayLike, mask: ArrayLike | None
) -> Float64[np.ndarray, "B T N"]:
  """`log_forget`, 0 where a mask of one row hides the position from all queries."""
  log_forget = np.asarray(log_forget, np.float64)
  if mask is None or np.shape(mask)[2] > 1:
    return log_forget
  return np.where(np.swapaxes(np.asarray(mask)[:, :, 0], 1, 2), log_forget, 0.0)


def capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
  """Cap · tanh(logits / cap); None changes nothing."""
  return logits if cap is None else cap * np.tanh(logits / cap)


def shown(
  mask_mod: Callable[..., ArrayLike] | None,
  b: int,
  n: int,
  t: int,
  s: np.ndarray,
) -> Bool[np.ndarray, "S"]:
  """Which of the keys s a mask_mod shows; None shows all."""
  if mask_mod is None:
    return np.ones(s.shape, bool)
  return np.broadcast_to(np.asarray(mask_mod(b, n, t, s), bool), s.shape)


def at_distance(
  table: Float64[np.ndarray, "D *A"], distance: np.ndarray
) -> np.ndarray:
  """The entries for distances clipped to −L … L of a table of D = 2L+1."""
  longest = len(table) // 2
  return table[longest + np.clip(distance, -longest, longest)]


def relative_tables(
  relative_bias: ArrayLike | None,
  relative_keys: ArrayLike | None,
  num_heads: int,
  head_dim: int,
) -> tuple[Float64[np.ndarray, "N D"], Float64[np.ndarray, "N E H"]]:
  """Both tables, of every head; None becomes zeros for L = 0, adding nothing."""
  if relative_bias is None:
    relative_bias = np.zeros((num_heads, 1))
  if relative_keys is None:
    relative_keys = np.zeros((1, head_dim))
  bias, keys = as_float64(relative_bias, relative_keys)
  return bias, np.broadcast_to(keys, (num_heads, *keys.shape[-2:]))
