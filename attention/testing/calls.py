"""Random calls, and how their results are compared."""

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.plug import Dims

_FEATURES = frozenset(
  {
    "causal",
    "mask",
    "full_mask",
    "segments",
    "bias",
    "relative",
    "sinks",
    "logits_soft_cap",
    "log_forget",
    "global",
  }
)


class Case(NamedTuple):
  """A shape and the options of a call, drawn by `draw`.

  Attributes:
    options: names: those of `supports`, 'scale', 'global_qkv', the two tables
      of 'relative' alone, and 'relative_keys_by_head'.
    length: T.
    source_length: S, None = T.
    num_kv_heads: K.
    value_dim: width of the values.
    batch: B.
    num_heads: N.
    head_dim: H.
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
    """The sizes from which a mechanism makes its variables."""
    # Longer than most calls, so that Linformer's first rows are in use.
    longest = max(self.keys, 16)
    return Dims(
      self.num_heads,
      self.num_kv_heads,
      self.head_dim,
      longest,
      self.num_kv_heads * self.head_dim,
    )

  @property
  def needs(self) -> frozenset[str]:
    """What a mechanism must support to take the call."""
    cross = {"cross"} if self.keys != self.length else set()
    options = (option.split("_")[0] for option in self.options)
    options = {*self.options, *options}
    return frozenset(_FEATURES.intersection(options) | cross)

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
        case "relative_keys_by_head":
          call["relative_keys"] = normal(N, 9, self.head_dim)
        case "relative":
          call["relative_bias"] = normal(N, 7)
          call["relative_keys"] = normal(9, self.head_dim)
        case "sinks":
          call["sinks"] = normal(N)
        case "logits_soft_cap":
          call["logits_soft_cap"] = 1.5
        case "log_forget":
          call["log_forget"] = -np.abs(normal(B, T, N))
        case "global":
          indices = rng.integers(0, S, (B, 3))
          indices[0, 1], indices[-1, 2] = -1, indices[-1, 0]
          call["global_indices"] = indices
        case "global_qkv":
          call["global_qkv"] = tuple(qkv())
        case _:
          raise ValueError(f"options: expected known names, got {option!r}")
    return arrays, call


def split(tree: Any) -> tuple[list, Callable[[Any], Any]]:
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


def as_jax(tree: Any) -> Any:
  """A call whose arrays are those of JAX, and whose flags are unchanged."""
  arrays, rebuild = split(tree)
  return rebuild(map(jnp.asarray, arrays))


# Not `assert`, which `python -O` leaves out and only pytest explains.
def require(condition: Any, message: str) -> None:
  """Raises AssertionError with `message` unless `condition` holds."""
  if not condition:
    raise AssertionError(message)


def assert_close(
  got: Any, expected: Any, tolerance: float, name: str = "the result"
) -> None:
  """Raises unless |got - expected| ≤ tolerance · (largest expected magnitude).

  Args:
    got: what a mechanism returned.
    expected: an array of the same shape.
    tolerance: the largest error, as a share of the largest expected value.
    name: what `got` is, for the message.

  Raises:
    AssertionError: the shapes or the values differ.
  """
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  require(
    got.shape == expected.shape,
    f"{name} has shape {got.shape}, expected {expected.shape}",
  )
  require(np.isfinite(got).all(), f"{name} is not finite")
  error, scale = np.abs(got - expected).max(), np.abs(expected).max()
  if error > tolerance * scale:
    where = np.unravel_index(np.abs(got - expected).argmax(), got.shape)
    raise AssertionError(
      f"{name} is off by {error:.2e}, which is {error / scale:.1e} of the "
      f"largest expected value and may be {tolerance:.0e}; at "
      f"{tuple(map(int, where))} it is {got[where]:.6g} and should be "
      f"{expected[where]:.6g}"
    )


def assert_same_bits(got: Any, expected: Any, message: str) -> None:
  """Raises with `message` and the difference unless two arrays are equal."""
  got, expected = np.asarray(got), np.asarray(expected)
  if not np.array_equal(got, expected):
    moved = np.abs(np.float64(got) - np.float64(expected)).max()
    raise AssertionError(f"{message}, by up to {moved:.2e}")
