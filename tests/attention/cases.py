"""Random calls for the contract suite, and how numbers are compared."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from attention import Dims

FEATURES = frozenset(
  {"causal", "mask", "full_mask", "segments", "bias", "relative", "global"}
)


class Case(NamedTuple):
  """A shape and the options of a call, drawn by `draw`.

  Attributes:
    options: names: those of `supports`, 'scale', 'global_qkv' and the two
      tables of 'relative' alone.
    length: T.
    source_length: S, None = T.
    num_kv_heads: K.
    value_dim: width of the values.
    batch: B.
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
    return self.length if self.source_length is None else self.source_length

  @property
  def dims(self) -> Dims:
    # Longer than most calls, so that Linformer's first rows are in use.
    longest = max(self.keys, 16)
    return Dims(self.num_heads, self.num_kv_heads, self.head_dim, longest)

  @property
  def needs(self) -> frozenset[str]:
    cross = {"cross"} if self.keys != self.length else set()
    options = (option.split("_")[0] for option in self.options)
    options = {*self.options, *options}
    return frozenset(FEATURES.intersection(options) | cross)

  def __str__(self) -> str:
    shape = f"T{self.length}S{self.keys}K{self.num_kv_heads}V{self.value_dim}"
    return "-".join([shape, *self.options])

  def draw(self, seed: int = 0) -> tuple[list, dict[str, Any]]:
    """Returns `[query, key, value]` and the options of the call."""
    rng = np.random.default_rng(seed)
    B, T, S, N = self.batch, self.length, self.keys, self.num_heads

    def normal(*shape):
      return rng.standard_normal(shape, np.float32)

    def qkv():
      return [
        normal(B, T, N, self.head_dim),
        normal(B, S, self.num_kv_heads, self.head_dim),
        normal(B, S, self.num_kv_heads, self.value_dim),
      ]

    arrays, call = qkv(), {}
    for option in self.options:
      match option:
        case "causal":
          call["is_causal"] = True
        case "scale":
          call["scale"] = 0.2
        case "mask":
          call["mask"] = rng.random((B, 1, 1, S)) < 0.7
        case "full_mask":
          call["mask"] = rng.random((B, N, T, S)) < 0.5
        case "segments":
          call["query_segment_ids"] = np.sort(rng.integers(0, 3, (B, T)))
          call["key_segment_ids"] = np.sort(rng.integers(0, 3, (B, S)))
        case "bias":
          call["bias"] = normal(1, N, T, S)
        case "relative_bias":
          call["relative_bias"] = normal(N, 7)
        case "relative_keys":
          call["relative_keys"] = normal(9, self.head_dim)
        case "relative":
          call["relative_bias"] = normal(N, 7)
          call["relative_keys"] = normal(9, self.head_dim)
        case "global":
          indices = rng.integers(0, S, (B, 3))
          indices[0, 1], indices[-1, 2] = -1, indices[-1, 0]
          call["global_indices"] = indices
        case "global_qkv":
          call["global_qkv"] = tuple(qkv())
        case _:
          raise ValueError(option)
    return arrays, call


def split(tree):
  """The array leaves of a call, and `rebuild` which puts others in their place.

  So a call can be handed to `jax.jit` with its arrays as arguments and its
  flags (`is_causal=True`) as Python values.
  """
  leaves, treedef = jax.tree.flatten(tree)
  is_array = [isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves]

  def rebuild(arrays):
    arrays = iter(arrays)
    return treedef.unflatten(
      next(arrays) if here else leaf
      for leaf, here in zip(leaves, is_array, strict=True)
    )

  return list(itertools.compress(leaves, is_array)), rebuild


def assert_close(got, expected, tolerance: float):
  """Asserts |got - expected| ≤ tolerance · (largest expected magnitude)."""
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  assert got.shape == expected.shape
  scale = np.abs(expected).max()
  error = np.abs(got - expected).max()
  assert error <= tolerance * scale, f"{error / scale:.2e} > {tolerance:.0e}"
