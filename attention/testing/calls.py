"""Random calls of mechanisms, and comparisons of their results."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np

from attention.mechanism import Dims


class Case(NamedTuple):
  """The sizes and the options of a random call.

  Options have the names of `supports`. Other options are 'scale', 'global_qkv', the
  single tables of 'relative', 'relative_keys_by_head', 'relative_queries_by_head',
  'sinks_by_query', 'bias_by_example' and 'mask_of_all_examples'. The sizes are T, S (None is T), K, V, B, N and H.
  """

  options: tuple[str, ...] = ()
  length: int = 13
  source_length: int | None = None
  num_kv_heads: int = 2
  value_dim: int = 8
  batch: int = 2
  num_heads: int = 4
  head_dim: int = 8

  @property
  def keys(self) -> int:
    """S."""
    return self.length if self.source_length is None else self.source_length

  @property
  def dims(self) -> Dims:
    """The sizes from which a mechanism initialises its variables."""
    N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
    # Longer than most calls, so that Linformer uses only its first rows.
    return Dims(N, K, H, max(self.keys, 16), K * H)

  def limited(self, supports: Collection[str]) -> "Case":
    """Returns the case without options that a mechanism does not support."""
    known = {"scale", *supports}
    # 'bias_by_example' is a form of 'bias'.
    options = [
      x for x in self.options if any(f"{x}_".startswith(f"{y}_") for y in known)
    ]
    return self._replace(options=tuple(options))

  def __str__(self) -> str:
    shape = f"T{self.length}S{self.keys}K{self.num_kv_heads}V{self.value_dim}"
    return "-".join([shape, *self.options])

  def draw(self, seed: int = 0) -> tuple[list, dict[str, Any]]:
    """Draws `[query, key, value]` and the options of the call.

    The arrays are read-only, because programs that are still running may read them.
    """
    rng = np.random.default_rng(seed)
    B, T, S = self.batch, self.length, self.keys
    N, K, H = self.num_heads, self.num_kv_heads, self.head_dim

    def normal(*shape):
      return rng.standard_normal(shape, np.float32)

    def qkv():
      shapes = (B, T, N, H), (B, S, K, H), (B, S, K, self.value_dim)
      return [normal(*shape) for shape in shapes]

    def global_indices():
      indices = rng.integers(0, S, (B, 3))
      indices[0, 1], indices[-1, 2] = -1, indices[-1, 0]
      return indices

    def segments(length):
      return np.sort(rng.integers(0, 3, (B, length)))

    draw_option = {
      "causal": lambda: {"is_causal": True},
      "scale": lambda: {"scale": 0.2},
      "mask": lambda: {"mask": rng.random((B, 1, 1, S)) < 0.7},
      "mask_of_all_examples": lambda: {"mask": rng.random((1, 1, 1, S)) < 0.7},
      "full_mask": lambda: {"mask": rng.random((B, N, T, S)) < 0.5},
      "segments": lambda: {
        "query_segment_ids": segments(T),
        "key_segment_ids": segments(S),
      },
      "bias": lambda: {"bias": normal(1, N, T, S)},
      "bias_by_example": lambda: {"bias": normal(B, N, T, S)},
      "relative_bias": lambda: {"relative_bias": normal(N, 7)},
      "relative_keys": lambda: {"relative_keys": normal(9, H)},
      "relative_keys_by_head": lambda: {"relative_keys": normal(N, 9, H)},
      "relative_queries_by_head": lambda: {
        "relative_queries": normal(N, 11, H)
      },
      "relative": lambda: {
        "relative_bias": normal(N, 7),
        "relative_keys": normal(9, H),
        "relative_queries": normal(11, H),
      },
      "sinks": lambda: {"sinks": normal(N)},
      "sinks_by_query": lambda: {"sinks": normal(B, T, N)},
      "logits_soft_cap": lambda: {"logits_soft_cap": 1.5},
      "log_forget": lambda: {"log_forget": -np.abs(normal(B, T, N))},
      "global": lambda: {"global_indices": global_indices()},
      "global_qkv": lambda: {"global_qkv": tuple(qkv())},
    }
    arrays, call = qkv(), {}
    for option in self.options:
      call |= draw_option[option]()
    for x in jax.tree.leaves((arrays, call)):
      if isinstance(x, np.ndarray):
        x.setflags(write=False)
    return arrays, call


LONG_CAUSAL = Case(
  ("causal", "mask", "relative_keys", "log_forget", "sinks_by_query"),
  length=307,
  batch=1,
)
"""Longer than a block, so that states and windows cross block boundaries."""


# Not an `assert`, which `python -O` removes and only pytest explains.
def require(condition: Any, message: str) -> None:
  """Raises AssertionError with `message` unless `condition` holds."""
  if not condition:
    raise AssertionError(message)


def assert_close(
  got: Any, expected: Any, tolerance: float, name: str = "the result"
) -> None:
  """Raises unless |got - expected| ≤ tolerance · (largest expected magnitude).

  The AssertionError refers to `got` by its `name`.
  """
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  message = f"{name} has shape {got.shape}, expected {expected.shape}"
  require(got.shape == expected.shape, message)
  require(np.isfinite(got).all(), f"{name} is not finite")
  error, scale = np.abs(got - expected).max(), np.abs(expected).max()
  if error > tolerance * scale:
    index = np.unravel_index(np.abs(got - expected).argmax(), got.shape)
    raise AssertionError(
      f"{name} is off by {error:.2e}, which is {error / scale:.1e} of the "
      f"largest expected value and may be {tolerance:.0e}; at "
      f"{tuple(map(int, index))} it is {got[index]:.6g} and should be "
      f"{expected[index]:.6g}"
    )


def assert_same_bits(got: Any, expected: Any, message: str) -> None:
  """Raises with `message` and the difference unless two arrays are equal."""
  got, expected = np.asarray(got), np.asarray(expected)
  if not np.array_equal(got, expected):
    difference = np.abs(np.float64(got) - np.float64(expected)).max()
    raise AssertionError(f"{message}, by up to {difference:.2e}")
