"""What tests of attention share: arrays, compiled calls with gradients, refusals."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing import assert_close


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
  """An array for each shape; NumPy draws, so that nothing is compiled."""
  rng = np.random.default_rng(seed)
  return [jnp.asarray(rng.standard_normal(x, np.float32)) for x in shapes]


def draw(
  length: int,
  source: int | None = None,
  *,
  heads: int = 4,
  kv_heads: int = 2,
  dim: int = 8,
  value: int = 8,
  batch: int = 2,
  seed: int = 0,
) -> list[jax.Array]:
  """Query, key and value."""
  source = length if source is None else source
  return normal(
    (batch, length, heads, dim),
    (batch, source, kv_heads, dim),
    (batch, source, kv_heads, value),
    seed=seed,
  )


def random_mask(*shape: int, share: float = 0.7, seed: int = 1) -> jax.Array:
  """Booleans of which a share is True."""
  return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


def pulled(function: Callable, *arguments: Any, cotangent: Any = None) -> tuple:
  """The result of a compiled call and its gradients; all that is returned counts.

  The cotangent None is cos 0, cos 1, cos 2, … for every array of the result.
  """

  def waves(x):
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

  @jax.jit
  def run(arguments, cotangent):
    out, pullback = jax.vjp(function, *arguments)
    wave = jax.tree.map(waves, out) if cotangent is None else cotangent
    return out, pullback(wave)

  return jax.device_get(run(arguments, cotangent))


def assert_equal(got: Any, expected: Any, tolerance: float) -> None:
  """Two trees of arrays are alike, each array by its largest number."""
  named = jax.tree_util.tree_leaves_with_path(got)
  for (path, x), y in zip(named, jax.tree.leaves(expected), strict=True):
    if x.dtype != jax.dtypes.float0:  # Of whole numbers.
      assert_close(x, y, tolerance, jax.tree_util.keystr(path) or "the result")


def in_float64(function: Callable, *arguments: Any) -> Any:
  """A function of `jax.numpy` on arguments in float64, as NumPy's arrays."""

  def wide(x):
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return np.asarray(x, np.float64) if is_float else x

  with jax.enable_x64(True):
    return jax.device_get(function(*jax.tree.map(wide, arguments)))


def assert_refused(
  function: Callable, cases: Iterable[tuple[str, dict[str, Any]]]
) -> None:
  """Every call with the options of a case raises what begins with its message."""
  for message, options in cases:
    with pytest.raises(ValueError, match=f"^{message}"):
      function(**options)
