"""Stick-breaking attention: gradients of long rows, digits, order, errors."""

from functools import partial

import jax
import numpy as np
import pytest

from attention import definitions, stick_breaking_attention
from tests.attention.calls import assert_defined, masked_segments
from tests.refusals import assert_refused

LENGTH = 300


def draw(length=LENGTH, size=1.0, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 5)
  query, *kv = (rng.standard_normal(x, np.float32) for x in shapes)
  return size * query, *kv


@pytest.mark.parametrize(
  ("size", "attend_current"), [(1.0, False), (30.0, False), (30.0, True)]
)
def test_values_and_gradients(size, attend_current):
  """Hidden keys may hold anything."""
  qkv, call = draw(size=size), masked_segments(LENGTH)
  call["attend_current"] = attend_current
  spoiled = [x.copy() for x in qkv]
  for x in spoiled[1:]:
    x[~np.asarray(call["mask"])[:, 0, 0]] = np.nan
  assert_defined(
    lambda qkv: stick_breaking_attention(*qkv, **call),
    lambda qkv: definitions.stick_breaking_attention(*qkv, **call),
    list(qkv),
    spoiled=spoiled,
    tolerance=2e-6 * max(size, 5.0),
  )


def test_small_shares_keep_their_digits():
  """Shares near e⁻²⁰ of hundreds of keys, and what a far key has after them."""
  query, key = np.full((2, 1, LENGTH, 1, 1), np.sqrt(20), np.float32)
  key[:, 1:] *= -1  # The first key breaks nearly all off, the others nothing.
  value = np.ones_like(key)
  value[:, 0] = 0.0
  call = {"scale": 1.0}
  found = jax.jit(partial(stick_breaking_attention, **call))(query, key, value)
  expected = definitions.stick_breaking_attention(query, key, value, **call)
  np.testing.assert_allclose(found[:, 2:], expected[:, 2:], rtol=2e-5)


@pytest.mark.parametrize("attend_current", [False, True])
def test_keys_are_taken_from_the_nearest_on(attend_current):
  """Of keys that break all off, the nearest has everything."""
  query, _, value = draw(20)
  query = np.abs(query)
  key = np.full((2, 20, 2, 8), 1e4, np.float32)
  run = partial(
    stick_breaking_attention, attend_current=attend_current, block_size=8
  )
  found = jax.jit(run)(query, key, value)
  value = np.repeat(value, 2, axis=2)
  if not attend_current:
    value = np.concatenate([0.0 * value[:, :1], value[:, :-1]], axis=1)
  np.testing.assert_array_equal(found, value)


def test_what_does_not_fit_is_told(unchecked):
  assert_refused(
    partial(stick_breaking_attention, *draw(9)),
    {"is_causal": False},
    {"attend_current": 1},
    {"bias": 1.0},
  )
