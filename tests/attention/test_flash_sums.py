"""Flash without maxima: rows whose sum leaves the range are made again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, flash_attention
from tests.attention.calls import assert_defined

LENGTH, HEADS, WIDTH = 45, 2, 6
# Rows of every kind in one block: in range, at its ends (e^±40), far outside.
ALL = np.ones((2, HEADS, LENGTH, LENGTH), bool)
LEVELS = np.array([0, 39, 41, -39, -41, 88, 104, -104, 300, -300])


def draw(size):
  """Inputs whose logits are whole numbers, exact in float32, and levels."""
  rng = np.random.default_rng(size)
  query, key = rng.integers(-size, size + 1, (2, 2, LENGTH, HEADS, WIDTH))
  value = rng.standard_normal((2, LENGTH, HEADS, WIDTH))
  level = LEVELS[rng.integers(0, len(LEVELS), (2, HEADS, LENGTH, 1))]
  return [np.asarray(x, np.float32) for x in (query, key, value, level)]


def defined(query, key, value, level, mask=None, is_causal=False):
  options = {"bias": level, "scale": 1.0, "is_causal": is_causal}
  return definitions.dense_attention(query, key, value, mask=mask, **options)


def flash(query, key, value, level, **call):
  call |= {"bias": level, "scale": 1.0, "block_size": (16, 8)}
  return flash_attention(query, key, value, **call)


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
      *qkv, level = draw(size)
      call = {"mask": mask, "is_causal": is_causal, "level": level}
      # A float32 log-sum-exp of 900 is good to 3e-5; gradients are made of it.
      assert_defined(
        lambda qkv, call=call: flash(*qkv, **call),
        lambda qkv, call=call: defined(*qkv, **call),
        qkv,
        of_largest=1e-5,
      )


def test_a_lost_row_leaves_the_others_alone():
  """Their bits are those without it, in the same block and in others."""
  *qkv, level = draw(2)
  calm, wild = np.zeros_like(level), np.zeros_like(level)
  wild[0, 1, 5] = 500.0
  got, expected = (
    np.asarray(flash(*qkv, x, is_causal=True)) for x in (wild, calm)
  )
  others = np.ones(got.shape, bool)
  others[0, 5, 1] = False
  np.testing.assert_array_equal(got[others], expected[others])


def test_under_vmap_only_what_is_lost_changes():
  arrays = [x[:, None] for x in draw(2)]

  one_by_one = jax.jit(lambda *arrays: flash(*arrays))
  expected = [one_by_one(*x) for x in zip(*arrays, strict=True)]
  got = jax.jit(jax.vmap(flash))(*arrays)
  np.testing.assert_allclose(got, np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_values_in_half_precision(dtype):
  """float16 ends at 6.6e4, e^11: its exponentials always need the maximum."""
  *qkv, level = draw(2)
  level = np.clip(level, -15, 15)
  arrays = [x.astype(dtype) for x in qkv]
  got = flash(*arrays, level)
  wide = [x.astype(np.float32) for x in arrays]
  expected = defined(*wide, level)
  error = np.abs(np.asarray(got, np.float32) - expected).max()
  assert error <= 4 * float(jnp.finfo(dtype).eps)
