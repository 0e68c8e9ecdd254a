"""Flash without maxima: rows whose sum leaves the range are made again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import flash_attention

LENGTH, HEADS, WIDTH = 45, 2, 6
# Rows of every kind in one block: in range, at its ends (e^±40), far outside.
ALL = np.ones((2, HEADS, LENGTH, LENGTH), bool)
LEVELS = np.array([0, 39, 41, -39, -41, 88, 104, -104, 300, -300])


def draw(size):
  """Inputs whose logits are whole numbers, exact in float32, and levels."""
  rng = np.random.default_rng(size)
  query, key = rng.integers(-size, size + 1, (2, 2, LENGTH, HEADS, WIDTH))
  value, cotangent = rng.standard_normal((2, 2, LENGTH, HEADS, WIDTH))
  level = LEVELS[rng.integers(0, len(LEVELS), (2, HEADS, LENGTH, 1))]
  arrays = (query, key, value, level, cotangent)
  return [np.asarray(array, np.float32) for array in arrays]


def reference(query, key, value, level, cotangent, mask, is_causal):
  """Output and gradients to query, key, value and level, in float64."""
  query, key, value, level, g = (
    np.asarray(x, np.float64) for x in (query, key, value, level, cotangent)
  )
  allowed = np.tril(mask) if is_causal else mask
  x = np.einsum("bthd,bshd->bhts", query, key) + level
  x = np.where(allowed, x, -np.inf)
  p = np.exp(x - np.max(x, -1, keepdims=True, initial=-1e300))
  p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
  dp = np.einsum("bthd,bshd->bhts", g, value)
  ds = p * (dp - (p * dp).sum(-1, keepdims=True))
  return (
    np.einsum("bhts,bshd->bthd", p, value),
    np.einsum("bhts,bshd->bthd", ds, key),
    np.einsum("bhts,bthd->bshd", ds, query),
    np.einsum("bhts,bthd->bshd", p, g),
  )


@functools.partial(jax.jit, static_argnames=("is_causal",))
def with_gradients(query, key, value, level, cotangent, mask, is_causal):
  def call(query, key, value):
    return flash_attention(
      query,
      key,
      value,
      bias=level,
      mask=mask,
      scale=1.0,
      is_causal=is_causal,
      block_size=(16, 8),
    )

  out, pullback = jax.vjp(call, query, key, value)
  return out, *pullback(cotangent)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_every_size(is_causal):
  rng = np.random.default_rng(5)
  by_pair = rng.random(ALL.shape) < 0.5
  by_pair[0, 1, ::4] = False
  by_key = ALL & (rng.random((2, 1, 1, LENGTH)) < 0.7)
  by_key[1] = False
  for mask in (ALL, by_pair, by_key):
    # Logits of up to 24 and of up to 600, and the levels of the rows beside.
    for size in (2, 10):
      arrays = draw(size)
      expected = reference(*arrays, mask, is_causal)
      got = with_gradients(*arrays, mask, is_causal=is_causal)
      # A float32 log-sum-exp of 900 is good to 3e-5; gradients are made of it.
      for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        atol = (1e-4 if i else 2e-6) * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def test_a_lost_row_leaves_the_others_alone():
  """Their bits are those without it, in the same block and in others."""
  query, key, value, level, cotangent = draw(2)
  calm, wild = np.zeros_like(level), np.zeros_like(level)
  wild[0, 1, 5] = 500.0
  got, expected = (
    np.asarray(
      with_gradients(query, key, value, x, cotangent, ALL, is_causal=True)[0]
    )
    for x in (wild, calm)
  )
  others = np.ones(got.shape, bool)
  others[0, 5, 1] = False
  np.testing.assert_array_equal(got[others], expected[others])


def test_under_vmap_only_what_is_lost_changes():
  *arrays, _ = (x[:, None] for x in draw(2))

  def call(query, key, value, level):
    options = {"bias": level, "scale": 1.0, "block_size": 16}
    return flash_attention(query, key, value, **options)

  one_by_one = jax.jit(call)
  expected = [one_by_one(*x) for x in zip(*arrays, strict=True)]
  got = jax.jit(jax.vmap(call))(*arrays)
  np.testing.assert_allclose(got, np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_values_in_half_precision(dtype):
  """float16 ends at 6.6e4, e^11: its exponentials always need the maximum."""
  *qkv, level, cotangent = draw(2)
  level = np.clip(level, -15, 15)
  arrays = [x.astype(dtype) for x in qkv]
  call = {"bias": level, "scale": 1.0, "block_size": 16}
  got = jax.jit(functools.partial(flash_attention, **call))(*arrays)
  wide = [x.astype(np.float32) for x in arrays]
  expected = reference(*wide, level, cotangent, ALL, False)[0]
  error = np.abs(np.asarray(got, np.float32) - expected).max()
  assert error <= 4 * float(jnp.finfo(dtype).eps)
