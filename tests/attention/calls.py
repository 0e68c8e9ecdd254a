"""Shared helpers of attention tests: arrays, calls with gradients, assertions."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import attention_weights
from attention.platform import backend
from attention.testing import assert_close


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
  """Draws an array per shape with NumPy, which compiles nothing."""
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
  """Draws query, key and value."""
  source = length if source is None else source
  return normal(
    (batch, length, heads, dim),
    (batch, source, kv_heads, dim),
    (batch, source, kv_heads, value),
    seed=seed,
  )


def random_mask(*shape: int, share: float = 0.7, seed: int = 1) -> jax.Array:
  """Draws booleans, a share of which is True."""
  return jnp.asarray(np.random.default_rng(seed).random(shape) < share)


def pulled(function: Callable, *arguments: Any, cotangent: Any = None) -> tuple:
  """Returns the results of a compiled call and its gradients.

  By default, the cotangent of every result is cos 0, cos 1, cos 2, ….
  """

  def waves(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

  @jax.jit
  def run(arguments, cotangent):
    out, pullback = jax.vjp(function, *arguments)
    wave = jax.tree.map(waves, out) if cotangent is None else cotangent
    return out, pullback(wave)

  return jax.device_get(run(arguments, cotangent))


def counted(out: Any, lse: Any) -> tuple[Any, Any, Any]:
  """Returns the output, the log-sum-exp with 0 for −∞, and where it is −∞."""
  xp = jnp if isinstance(lse, jax.Array) else np
  is_empty = lse == -xp.inf
  return out, xp.where(is_empty, 0.0, lse), 1.0 * is_empty


def lse_of(share: Any, sinks: Any = None) -> np.ndarray:
  """Computes the log-sum-exp of logits from an output for values of 1 and a sink of 0.

  This output is Σ e^x / (Σ e^x + 1) = σ(lse). `sinks` are further logits.
  """
  with np.errstate(divide="ignore"):
    lse = np.log(share) - np.log1p(-share)
  return lse if sinks is None else np.logaddexp(lse, sinks)


def assert_equal(got: Any, expected: Any, tolerance: float) -> None:
  """Asserts that trees are close, each array relative to its largest number."""
  named = jax.tree_util.tree_leaves_with_path(got)
  for (path, x), y in zip(named, jax.tree.leaves(expected), strict=True):
    if x.dtype != jax.dtypes.float0:  # The gradient of integers.
      assert_close(x, y, tolerance, jax.tree_util.keystr(path) or "the result")


def assert_defined(
  function: Callable,
  definition: Callable,
  arrays: Any,
  *,
  spoiled: Any = None,
  where: Iterable[str] = ("cpu",),
  tolerance: float = 1e-5,
  of_largest: float = 1e-8,
) -> None:
  """Asserts that a function has the results and gradients of its definition.

  The definition computes in float64. The gradient of each array is compared with a
  central difference along a random direction. The function gets `spoiled`, which has
  NaN at unread positions, and is traced for each platform. A gradient may differ by
  `tolerance` of itself plus `of_largest` of the largest gradient.
  """
  leaves, tree = jax.tree.flatten(jax.tree.map(wide, arrays))
  expected = definition(tree.unflatten(leaves))

  def total(i, moved):
    results = definition(tree.unflatten([*leaves[:i], moved, *leaves[i + 1 :]]))
    return sum(
      np.sum(np.cos(np.arange(x.size)).reshape(x.shape) * x)
      for x in jax.tree.leaves(results)
      if np.issubdtype(x.dtype, np.floating)
    )

  rng, step = np.random.default_rng(1), 1e-6
  along = {
    i: rng.standard_normal(x.shape)
    for i, x in enumerate(leaves)
    if np.issubdtype(x.dtype, np.floating)
  }
  slopes = {
    i: (total(i, leaves[i] + step * d) - total(i, leaves[i] - step * d))
    / (2 * step)
    for i, d in along.items()
  }
  for platform in where:
    with backend.tracing_for(platform):
      given = arrays if spoiled is None else spoiled
      found, (gradients,) = pulled(lambda x: function(x), given)
    assert_equal(found, expected, tolerance)
    named = jax.tree_util.tree_leaves_with_path(gradients)
    largest = max(np.linalg.norm(named[i][1]) for i in along)
    for i, slope in slopes.items():
      path, x = named[i]
      got = np.vdot(np.float64(x), along[i])
      bound = tolerance * np.linalg.norm(x) + of_largest * largest
      name = f"the gradient of {jax.tree_util.keystr(path)} on a {platform}"
      assert abs(got - slope) <= bound, f"{name}: {got}, not {slope}"


def wide(x: Any) -> np.ndarray:
  is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
  return np.asarray(x, np.float64 if is_float else None)


def assert_dropout(
  attend: Callable, query: Any, key: Any, value: Any, rate: float = 0.25
) -> np.ndarray:
  """Asserts that dropout scales weights by 0 or 1/(1 - rate), as do its gradients.

  Returns the pairs that are kept, `[B, N, T, S]`.
  """
  rng = jax.random.key(3)
  dropping = partial(attend, dropout_rate=rate, dropout_rng=rng)
  exact, weights = (
    np.asarray(jax.jit(partial(attention_weights, f))(query, key))
    for f in (attend, dropping)
  )
  kept, seen = weights != 0, exact != 0
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  spread = np.sqrt(rate * (1 - rate) / seen.sum())
  assert abs(kept[seen].mean() - (1 - rate)) < 4 * spread

  def by_hand(query, key, value):
    weights = attention_weights(attend, query, key) * kept / (1 - rate)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return jnp.einsum("BNTS,BSNV->BTNV", weights, value)

  found, expected = (pulled(f, query, key, value) for f in (dropping, by_hand))
  assert_equal(found, expected, 1e-5)
  return kept


def masked_segments(length):
  """A key mask that hides the first keys, and three segments."""
  rng = np.random.default_rng(1)
  mask = rng.random((2, 1, 1, length)) < 0.8
  mask[:, :, :, :3] = False
  ids = np.sort(rng.integers(0, 3, (2, length)))
  mask, ids = jnp.asarray(mask), jnp.asarray(ids)
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}
