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
  deberta_buckets,
  definitions,
  dense_attention,
  flash_attention,
  sliding_window_attention,
  t5_buckets,
)
from tests.attention.calls import (
  assert_defined,
  assert_equal,
  draw,
  normal,
  pulled,
)
from tests.refusals import assert_refused


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
  # With (18, 128), powers of 2 are the first distances of their buckets.
  ("num_buckets", "max_distance"),
  [(32, 128), (8, 20), (6, 9), (18, 128)],
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
  room = {"max_distance": 8}
  assert_refused(t5_buckets, room, room | {"num_buckets": 2})


def test_alibi_slopes_are_the_papers():
  np.testing.assert_allclose(
    alibi_slopes(8), [1 / 2**i for i in range(1, 9)], rtol=1e-12
  )
  np.testing.assert_allclose(alibi_slopes(16)[0], 2**-0.5, rtol=1e-12)
  twelve = [*alibi_slopes(8), *alibi_slopes(16)[0:8:2]]
  np.testing.assert_allclose(alibi_slopes(12), twelve, rtol=1e-12)
  table = [
    [-slope * far for far in (2, 1, 0, 1, 2)] for slope in (1 / 16, 1 / 256)
  ]
  np.testing.assert_array_equal(alibi_bias(2, 3), table)
  np.testing.assert_array_equal(alibi_bias(1, 1), [[0.0]])


@pytest.mark.parametrize(
  ("length", "source", "window", "by_head"),
  [(53, 120, (3, 9), False), (128, 128, (20, 20), True)],
)
def test_gradients_of_tables_by_blocks(length, source, window, by_head):
  """Blocks fold their queries before they take diagonals: beside autodiff.

  Of T < S and, where blocks do not move back, T = S.
  """
  offset = np.arange(source)[None] - np.arange(length)[:, None]
  mask = (offset >= -window[0]) & (offset <= window[1])
  mask = jnp.asarray(mask)[None, None]
  query, *kv = draw(length, source)
  keys = (4, 21, 8) if by_head else (21, 8)
  tables = normal((4, 31), keys, seed=1)

  def found(function, **options):
    def attend(query, relative_bias, relative_keys):
      call = {"relative_bias": relative_bias, "relative_keys": relative_keys}
      return function(query, *kv, **call, **options)

    return pulled(attend, query, *tables)

  expected = found(dense_attention, mask=mask)
  for got in (
    found(sliding_window_attention, window=window),
    found(flash_attention, mask=mask, block_size=(32, 16)),
  ):
    assert_equal(got, expected, 1e-5)


def test_a_table_for_each_head_with_dilation():
  """Heads of another dilation keep their own table, values and gradients."""
  qkv, (keys,) = draw(13), normal((4, 7, 8), seed=1)
  call = {"window": 3, "dilation": (1, 2, 1, 3)}

  def run(function):
    return lambda keys: function(*qkv, relative_keys=keys, **call)

  functions = (sliding_window_attention, definitions.sliding_window_attention)
  assert_defined(*map(run, functions), keys)


@pytest.mark.parametrize("name", ["relative_keys", "relative_queries"])
def test_tables_of_another_shape_are_refused(name):
  (query,) = normal((1, 5, 4, 8))
  shapes = (3, 7, 8), (4, 6, 8), (6, 8), (1, 4, 7, 8), (4, 1, 7, 8)
  assert_refused(
    functools.partial(dense_attention, query, query, query),
    *({name: jnp.ones(shape)} for shape in shapes),
  )


def test_rows_of_deberta():
  """Equation 3 without buckets; with them, the steps of the authors' code."""
  plain = deberta_buckets(5, max_distance=3, num_buckets=None)
  np.testing.assert_array_equal(plain, [5, 5, 5, 5, 4, 3, 2, 1, 0, 0, 0])
  rows = deberta_buckets(40, max_distance=24, num_buckets=8)
  # 1, 2, 3 and 4 have rows of their own; 23 is the last with row 8 + 7.
  ahead = [8, 9, 10, 11, 12, 13, 13, 13, 14, 14, 14, 14, 14, 15]
  np.testing.assert_array_equal(rows[40 - 13 : 41][::-1], ahead)
  np.testing.assert_array_equal(rows[:27], 15)
  assert (rows[40 + 23], rows[40 + 24], rows[80]) == (1, 0, 0)
  np.testing.assert_array_equal((16 - rows[::-1])[17:64], rows[17:64])
  # The least of everything.
  for longest, max_distance, num_buckets, expected in (
    (0, 1, None, [1]),
    (2, 1, None, [1, 1, 1, 0, 0]),
    (2, 3, 2, [3, 3, 2, 1, 1]),
    (5, 6, 8, [15, 12, 11, 10, 9, 8, 7, 6, 5, 4, 1]),
  ):
    sizes = {"max_distance": max_distance, "num_buckets": num_buckets}
    np.testing.assert_array_equal(deberta_buckets(longest, **sizes), expected)
  assert_refused(
    lambda **change: deberta_buckets(**{"longest": 5} | change),
    {"longest": -1},
    {"max_distance": 0},
    {"max_distance": 129},
    {"num_buckets": 1},
  )


def test_disentangled_attention():
  """Equation 4 of DeBERTa, pair by pair, from projected embeddings of positions."""
  rng = np.random.default_rng(0)
  B, T, N, K, H = 3, 9, 4, 2, 6
  query, out = rng.standard_normal((2, B, T, N, H))
  key, value = rng.standard_normal((2, B, T, K, H))
  far_keys, far_queries = rng.standard_normal((2, N, 8, H))
  with jax.enable_x64(True):
    rows = deberta_buckets(T - 1, max_distance=4, num_buckets=None)
    tables = {
      "relative_keys": far_keys[:, rows],
      "relative_queries": far_queries[:, rows],
    }
    scale = 1.0 / np.sqrt(3 * H)
    got = dense_attention(query, key, value, scale=scale, **tables)
  for b, n, t in np.ndindex(B, N, T):
    q, k, v = query[b, t, n], key[b, :, n // 2], value[b, :, n // 2]
    at = [min(max(t - s + 4, 0), 7) for s in range(T)]
    x = k @ q + far_keys[n, at] @ q
    x += np.array([k[s] @ far_queries[n, at[s]] for s in range(T)])
    weights = np.exp(scale * x)
    out[b, t, n] = weights @ v / weights.sum()
  np.testing.assert_allclose(got, out, rtol=0, atol=1e-13)
