"""Relative positions against the formulas of their papers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  alibi_bias,
  alibi_slopes,
  definitions,
  dense_attention,
  flash_attention,
  rotary,
  sliding_window_attention,
  t5_bias,
  t5_buckets,
)
from attention.testing import assert_close
from tests.attention.forms import thorough


def bucket_of(distance, num_buckets, max_distance, is_causal):
  """T5's bucket of one distance s − t, in words: half exact, half logarithmic."""
  first = 0
  if is_causal:
    back = max(-distance, 0)
  else:
    num_buckets //= 2
    first = num_buckets if distance > 0 else 0
    back = abs(distance)
  exact = num_buckets // 2
  if back < exact:
    return first + back
  share = math.log(back / exact) / math.log(max_distance / exact)
  # A tie is a power that the logarithm may miss by one bit.
  return first + min(
    exact + math.floor(share * (num_buckets - exact) + 1e-6), num_buckets - 1
  )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
  ("num_buckets", "max_distance"), [(32, 128), (8, 20), (6, 9)]
)
def test_t5_buckets(num_buckets, max_distance, is_causal):
  got = t5_buckets(max_distance, num_buckets=num_buckets, is_causal=is_causal)
  distances = range(-max_distance, max_distance + 1)
  expected = [
    bucket_of(d, num_buckets, max_distance, is_causal) for d in distances
  ]
  np.testing.assert_array_equal(got, expected)
  # So the last entry of the table serves every distance beyond it.
  for far in (max_distance + 1, 10 * max_distance):
    assert bucket_of(-far, num_buckets, max_distance, is_causal) == got[0]


def test_t5_buckets_need_room():
  with pytest.raises(ValueError, match=r"^max_distance: expected more than 8"):
    t5_buckets(8)
  with pytest.raises(ValueError, match="num_buckets of at least 4"):
    t5_buckets(8, num_buckets=2)


def test_alibi_slopes_are_the_papers():
  np.testing.assert_allclose(
    alibi_slopes(8), [1 / 2**i for i in range(1, 9)], rtol=1e-12
  )
  np.testing.assert_allclose(alibi_slopes(16)[0], 2**-0.5, rtol=1e-12)
  twelve = [*alibi_slopes(8), *alibi_slopes(16)[0:8:2]]
  np.testing.assert_allclose(alibi_slopes(12), twelve, rtol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tables_are_biases(is_causal):
  """The table gives what the T×S bias gives, here longer than L."""
  length, heads = 23, 4
  rng = np.random.default_rng(0)
  query, key, value = jnp.asarray(
    rng.standard_normal((3, 2, length, heads, 8), np.float32)
  )
  embedding = jnp.asarray(rng.standard_normal((8, heads), np.float32))
  distance = np.arange(length)[None, :] - np.arange(length)[:, None]
  t5 = np.array(
    [
      [embedding[bucket_of(d, 8, 10, is_causal)] for d in row]
      for row in distance.tolist()
    ]
  )
  alibi = -alibi_slopes(heads)[:, None, None] * np.abs(distance)
  for table, bias in (
    (t5_bias(embedding, 10, is_causal=is_causal), np.moveaxis(t5, 2, 0)),
    (alibi_bias(heads, length), alibi),
  ):
    attend = jax.jit(functools.partial(dense_attention, is_causal=is_causal))
    np.testing.assert_allclose(
      attend(query, key, value, relative_bias=table),
      attend(query, key, value, bias=jnp.asarray(bias, jnp.float32)[None]),
      atol=2e-6,
    )


@pytest.mark.parametrize(
  ("length", "source_length", "window", "by_head"),
  [
    (53, 120, (3, 9), False),
    (128, 128, 20, True),
    *thorough((90, 53, 17, True), (128, 128, 20, False)),
  ],
)
def test_gradients_of_tables_by_blocks(length, source_length, window, by_head):
  """Blocks fold their queries before they take diagonals: beside autodiff.

  Of T < S, T > S and, where blocks do not move back, T = S.
  """
  left, right = window if isinstance(window, tuple) else (window, window)
  offset = np.arange(source_length)[None] - np.arange(length)[:, None]
  mask = jnp.asarray((offset >= -left) & (offset <= right))[None, None]
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))

  query, cotangent = draw(2, length, 4, 8), draw(2, length, 4, 8)
  key, value = draw(2, source_length, 2, 8), draw(2, source_length, 2, 8)
  keys = draw(4, 21, 8) if by_head else draw(21, 8)
  tables = {"relative_bias": draw(4, 31), "relative_keys": keys}

  def pulled(function, **options):
    @jax.jit
    def both(query, tables):
      out, pullback = jax.vjp(
        lambda query, tables: function(query, key, value, **tables, **options),
        query,
        tables,
      )
      return out, pullback(cotangent)

    return both(query, tables)

  expected = pulled(dense_attention, mask=mask)
  for got in (
    pulled(sliding_window_attention, window=window),
    pulled(flash_attention, mask=mask, block_size=(32, 16)),
  ):
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), got, expected)


@pytest.mark.parametrize("dilation", [*thorough((1,)), (1, 2, 1, 3)])
def test_a_table_for_each_head_with_dilation(dilation):
  """Heads of another dilation keep their own table, values and gradients."""
  rng = np.random.default_rng(1)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))

  query, key, value = draw(2, 13, 4, 8), draw(2, 13, 2, 8), draw(2, 13, 2, 8)
  keys, cotangent = draw(4, 7, 8), draw(2, 13, 4, 8)
  call = {"window": 3, "dilation": dilation}

  @jax.jit
  def pulled(keys):
    def attend(keys):
      return sliding_window_attention(
        query, key, value, relative_keys=keys, **call
      )

    out, pullback = jax.vjp(attend, keys)
    return out, pullback(cotangent)[0]

  out, gradient = pulled(keys)
  expected = definitions.sliding_window_attention(
    query, key, value, relative_keys=keys, **call
  )
  assert_close(out, expected, 1e-5)
  # By the definition's differences: it is float64.
  direction = np.random.default_rng(2).standard_normal(keys.shape)

  def objective(step):
    moved = np.asarray(keys, np.float64) + step * direction
    at = definitions.sliding_window_attention(
      query, key, value, relative_keys=moved, **call
    )
    return np.sum(at * np.asarray(cotangent, np.float64))

  slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
  np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4)


@pytest.mark.parametrize(
  "shape", [(3, 7, 8), (4, 6, 8), (6, 8), (1, 4, 7, 8), (4, 1, 7, 8)]
)
def test_relative_keys_of_another_shape_are_refused(shape):
  query = jnp.ones((1, 5, 4, 8))
  with pytest.raises(
    ValueError,
    match=r"^relative_keys: expected \[2L\+1, 8\] or \[4, 2L\+1, 8\]",
  ):
    dense_attention(query, query, query, relative_keys=jnp.ones(shape))


def test_rotary_is_su():
  """R_p x with block-diagonal R of 2×2 rotations, on the paper's pairs."""
  length, head_dim = 40, 8
  x = np.random.default_rng(0).normal(size=(2, length, 3, head_dim))
  # Feature i of ours is feature 2i of the paper's, and i + H/2 is 2i + 1.
  paper = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)
  expected = np.zeros_like(x)
  for p in range(length):
    rotation = np.zeros((head_dim, head_dim))
    for i in range(head_dim // 2):
      angle = p * 10000.0 ** (-2 * i / head_dim)
      c, s = np.cos(angle), np.sin(angle)
      rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    expected[:, p] = x[:, p] @ rotation.T
  ids = jnp.arange(length)[None]
  got = rotary(jnp.asarray(x[..., paper], jnp.float32), ids)
  np.testing.assert_allclose(got, expected[..., paper], atol=1e-5)


def test_rotary_sees_distance_only():
  query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

  def product(t, s):
    turned_query = rotary(query, jnp.array([[t]]))
    return jnp.sum(turned_query * rotary(key, jnp.array([[s]])))

  np.testing.assert_allclose(product(7, 3), product(27, 23), atol=1e-5)
  assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_rotary_keeps_dtype_and_row_positions():
  x = jax.random.normal(jax.random.key(0), (2, 1, 1, 8), jnp.bfloat16)
  got = rotary(x, jnp.array([[3], [5]]))
  assert got.dtype == jnp.bfloat16
  one = rotary(x[1:], jnp.array([[5]]))
  np.testing.assert_array_equal(got[1:], one)


def test_rotary_needs_pairs():
  with pytest.raises(ValueError, match=r"^inputs: expected an even number"):
    rotary(jnp.ones((1, 2, 1, 3)), jnp.arange(2)[None])
