"""Performer beside the contract suite: features, chunks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  definitions,
  dense_attention,
  orthogonal_features,
  performer,
  performer_attention,
)
from tests.attention.calls import assert_defined, draw, normal
from tests.refusals import assert_refused

features = jax.jit(orthogonal_features, static_argnums=(1, 2))


def test_directions_are_orthogonal_within_each_block():
  found = np.asarray(features(jax.random.key(0), 20, 8))
  assert found.shape == (20, 8)
  for block in (found[:8], found[8:16], found[16:]):
    unit = block / np.linalg.norm(block, axis=1, keepdims=True)
    np.testing.assert_allclose(unit @ unit.T, np.eye(len(block)), atol=1e-5)
  # They are a function of the key.
  np.testing.assert_array_equal(found, features(jax.random.key(0), 20, 8))
  assert not np.allclose(found, features(jax.random.key(1), 20, 8))


def test_rows_are_standard_normal_one_by_one():
  @jax.jit
  def draws(key):
    keys = jax.random.split(key, 4000)
    return jax.vmap(lambda key: orthogonal_features(key, 4, 4))(keys)

  rows = np.reshape(draws(jax.random.key(1)), (-1, 4))
  np.testing.assert_allclose(rows.mean(0), 0.0, atol=0.05)
  np.testing.assert_allclose(np.cov(rows.T), np.eye(4), atol=0.06)


@pytest.mark.parametrize("between", [None, 0, 70])
def test_one_dominating_key_per_feature_is_not_lost(between):
  """Features whose scales lie 200 nats apart each keep their own key.

  With one scale for the whole state, the weaker feature underflows and a query
  that reads it alone gets 0/0. Causal, the query stands in the keys' chunk or in
  the next: up to the largest feature of any key, what it reads is e^-130.
  """
  length = 3 + (between or 0)
  projection = jnp.asarray(20 * np.eye(2, dtype=np.float32))
  key, value = np.zeros((2, 1, length, 1, 2), np.float32)
  key[0, 0, 0, 0], key[0, 1, 0, 1] = 10.0, 1.0
  value[0, :2, 0] = np.eye(2)
  query = np.tile(np.float32([-10.0, 10.0]), (1, length, 1, 1))
  call = {"projection": projection, "scale": 1.0}
  call["mask"] = jnp.asarray(np.arange(length) < 2)[None, None, None]
  attend = functools.partial(
    performer_attention, is_causal=between is not None, **call
  )
  out = jax.jit(attend)(query, key, value)
  np.testing.assert_allclose(out[0, -1, 0], [0.0, 1.0], atol=1e-6)


def test_keys_far_from_every_feature_of_a_query_are_not_lost():
  """Scores in a chunk down to e^-1000: value, gradient and the future.

  Products of features are all 0 there in float32; the logarithms are exact to
  their own rounding, which is what the tolerance is for. Also in all chunks at
  once, as an accelerator has them.
  """
  (projection,) = normal((24, 8), seed=1)
  query, key, value = map(np.asarray, draw(70, heads=2, batch=1))
  qkv = 20 * query, 20 * key, value
  call = {"projection": projection, "is_causal": True}
  for where, options in (("cpu", {}), ("gpu", {"block_size": 16})):
    assert_defined(
      lambda qkv, more=options: performer_attention(*qkv, **call, **more),
      lambda qkv: definitions.performer_attention(*qkv, **call),
      qkv,
      where=(where,),
      tolerance=1e-4,
    )
  later = [x.copy() for x in qkv]
  for x in later:
    x[:, 40:] = 1.0
  run = jax.jit(functools.partial(performer_attention, **call))
  np.testing.assert_array_equal(run(*later)[:, :40], run(*qkv)[:, :40])


@jax.jit
def errors(qkv, projections):
  """Root mean square error against dense, one for each projection."""
  exact = dense_attention(*qkv)

  def error(projection):
    out = performer_attention(*qkv, projection=projection)
    return jnp.sqrt(jnp.mean((out - exact) ** 2))

  return jax.vmap(error)(projections).mean()


def test_the_error_falls_with_the_root_of_the_features():
  """And orthogonal features are nearer than independent ones."""
  # Logits near 1, where the law has set in by M = 16.
  query, key, value = map(np.asarray, draw(13, heads=1, kv_heads=1, batch=1))
  qkv = query / 2, key / 2, value

  @functools.partial(jax.jit, static_argnums=1)
  def drawn(key, count):
    keys = jax.random.split(key, 48)
    return jax.vmap(lambda key: orthogonal_features(key, count, 8))(keys)

  def error(projections):
    # Rows again and again: the same estimator, and one shape for all M.
    repeats = 1024 // projections.shape[1]
    return errors(qkv, np.repeat(projections, repeats, axis=1))

  counts = [16, 64, 256, 1024]
  means = [error(drawn(jax.random.key(x), x)) for x in counts]
  slope = np.polyfit(np.log(counts), np.log(means), 1)[0]
  assert -0.65 <= slope <= -0.35, f"slope {slope:.3f}, errors {means}"
  (independent,) = normal((48, 16, 8), seed=1)
  assert means[0] < error(independent)


def test_what_does_not_fit_is_refused(unchecked):
  assert_refused(performer, {"num_features": 0}, {"kernel": "cosine"})
  attend = functools.partial(performer_attention, projection=normal((6, 8))[0])
  assert_refused(lambda **x: attend(*draw(4), **x), {"scale": -1.0})
