"""Stick-breaking attention: gradients of long rows, digits, order, errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, stick_breaking_attention
from tests.attention.calls import assert_refused, in_float64, pulled

LENGTH = 300


def draw(length=LENGTH, size=1.0, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 5)
  query, *kv = (rng.standard_normal(x, np.float32) for x in shapes)
  return size * query, *kv


def options(length=LENGTH):
  """A key mask that hides the first keys, and three segments."""
  rng = np.random.default_rng(1)
  mask = rng.random((2, 1, 1, length)) < 0.8
  mask[:, :, :, :3] = False
  ids = np.sort(rng.integers(0, 3, (2, length)))
  mask, ids = jnp.asarray(mask), jnp.asarray(ids)
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}


def naive(query, key, value, shown):
  """The formula over whole rows, to be differentiated in float64."""
  key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
  x = jnp.einsum("btnh,bsnh->bnts", query, key) * 8**-0.5
  breaks = jnp.where(shown, jax.nn.softplus(x), 0.0)
  later = jnp.cumsum(breaks[..., ::-1], axis=-1)[..., ::-1] - breaks
  weights = jnp.exp(-jax.nn.softplus(-x) - later)
  return jnp.einsum("bnts,bsnv->btnv", jnp.where(shown, weights, 0.0), value)


@pytest.mark.parametrize(
  ("size", "attend_current"), [(1.0, False), (30.0, False), (30.0, True)]
)
def test_values_and_gradients(size, attend_current):
  """Hidden keys may hold anything."""
  qkv, call = draw(size=size), options()
  mask, ids = (np.asarray(call[x]) for x in ("mask", "query_segment_ids"))
  shown = mask & np.tri(LENGTH, k=attend_current - 1, dtype=bool)
  shown = shown & (ids[:, None, :, None] == ids[:, None, None])
  cotangent = np.random.default_rng(2).normal(size=(2, LENGTH, 4, 5))
  expected = in_float64(
    lambda *qkv: pulled(partial(naive, shown=shown), *qkv, cotangent=cotangent),
    *qkv,
  )
  for x in qkv[1:]:
    x[~mask[:, 0, 0]] = np.nan
  function = partial(
    stick_breaking_attention, attend_current=attend_current, **call
  )
  found = pulled(function, *qkv, cotangent=np.float32(cotangent))
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    bound = 2e-6 * size * max(1.0, np.abs(other).max())
    np.testing.assert_allclose(one, other, atol=bound)


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
    (
      ("is_causal: expected True, got False;", {"is_causal": False}),
      ("mask: expected a key mask", {"mask": np.ones((2, 1, 9, 9), bool)}),
      ("attend_current: expected True or False, got 1", {"attend_current": 1}),
      ("bias: stick_breaking_attention has no such option;", {"bias": 1.0}),
    ),
  )
