"""Functions for all definitions: heads, visible pairs, softmax and weighted values."""

from collections.abc import Callable

from jaxtyping import Bool, Float, Float64
import numpy as np
from numpy.typing import ArrayLike

Result = Float64[np.ndarray, "B T N V"]
"""The result of a definition; zeros for a query that sees no key."""


def as_float64(*arrays: ArrayLike) -> list[np.ndarray]:
  """Converts arrays to float64 NumPy arrays."""
  return [np.asarray(array, np.float64) for array in arrays]


def repeat_heads(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Repeats heads `[B, S, K, …]` to `[B, S, N, …]`; head n is a copy of n // (N/K)."""
  return np.repeat(array, num_heads // array.shape[2], axis=2)


def visible_pairs(
  query: ArrayLike,
  key: ArrayLike,
  *,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Bool[np.ndarray, "B N T S"]:
  """The pairs of query and key that the options of `dense_attention` allow.

  Raises:
    ValueError: the mask has a wrong shape, or only one of the segment ids is given.
  """
  batch, length, num_heads, _ = np.shape(query)
  shape = batch, num_heads, length, np.shape(key)[1]
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
    query_ids = np.asarray(query_segment_ids)[:, None, :, None]
    visible &= query_ids == np.asarray(key_segment_ids)[:, None, None, :]
  return visible


def visible_tokens(
  mask: ArrayLike | None, batch: int, length: int
) -> Bool[np.ndarray, "B S"]:
  """The tokens that a key mask allows; ValueError for a mask of another shape."""
  mask = np.asarray(True if mask is None else mask)
  return np.broadcast_to(mask, (batch, 1, 1, length))[:, 0, 0]


def zero_masked(x: np.ndarray, visible: np.ndarray) -> np.ndarray:
  """Sets `x` `[B, S, …]` to 0 where `visible` `[B, S]` is False, even if it is NaN."""
  return np.where(visible.reshape(*visible.shape, *[1] * (x.ndim - 2)), x, 0.0)


def check_both_directions(query, key, is_causal=False, **options) -> None:
  """Raises ValueError if the call is causal, or if S is not T."""
  del options
  length, source_length = np.shape(query)[1], np.shape(key)[1]
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if source_length != length:
    raise ValueError(f"key: expected length {length}, got {source_length}")


def logit_scale(scale: float | ArrayLike | None, head_dim: int) -> np.ndarray:
  """The factor of the logits; None is 1/√H."""
  return np.asarray(head_dim**-0.5 if scale is None else scale)


def softmax(
  logits: np.ndarray, sink: float | np.floating = -np.inf
) -> np.ndarray:
  """exp(x_s) / (exp(sink) + Σ_r exp(x_r)) along the last axis.

  It returns zeros if all x are −∞. The axis may be empty.
  """
  largest = logits.max(-1, keepdims=True, initial=sink)
  # Subtracting the largest logit avoids overflow and does not change the result.
  weights = np.exp(logits - np.where(largest == -np.inf, 0, largest))
  total = weights.sum(-1, keepdims=True)
  if sink > -np.inf:
    total = total + np.exp(sink - largest)
  return weights / np.where(total == 0, 1, total)


def weighted_values(
  weights: Callable[[int, int, int, np.ndarray], np.ndarray],
  value: Float64[np.ndarray, "B S K V"],
  visible: Bool[np.ndarray, "B N T S"],
) -> Result:
  """out[b, t, n] = Σ_s weights(b, n, t, s) v_s over the visible s.

  `weights` gets an array of all visible s, in ascending order. Values at other
  positions are not read.
  """
  batch, num_heads, length, _ = visible.shape
  value = repeat_heads(value, num_heads)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    s = np.flatnonzero(visible[b, n, t])
    out[b, t, n] = weights(b, n, t, s) @ value[b, s, n]
  return out


def at_distance(
  table: Float[np.ndarray, "D *A"], distance: np.ndarray
) -> np.ndarray:
  """The entries of a table of D = 2L+1 rows for distances, which are clipped to ±L."""
  longest = len(table) // 2
  return table[longest + np.clip(distance, -longest, longest)]
