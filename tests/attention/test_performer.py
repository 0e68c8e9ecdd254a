"""Performer beside the contract suite: features, chunks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  orthogonal_features,
  performer,
  performer_attention,
)
from tests.attention.forms import thorough


def _inputs(length, seed=0, heads=2, head_dim=8):
  keys = jax.random.split(jax.random.key(seed), 3)
  return [jax.random.normal(k, (1, length, heads, head_dim)) for k in keys]


def test_directions_are_orthogonal_within_each_block():
  features = orthogonal_features(jax.random.key(0), 20, 8)
  assert features.shape == (20, 8)
  for block in (features[:8], features[8:16], features[16:]):
    unit = block / jnp.linalg.norm(block, axis=1, keepdims=True)
    np.testing.assert_allclose(unit @ unit.T, np.eye(len(block)), atol=1e-5)


def test_rows_are_standard_normal_one_by_one():
  draws = jax.vmap(lambda k: orthogonal_features(k, 4, 4))(
    jax.random.split(jax.random.key(1), 4000)
  )
  rows = draws.reshape(-1, 4)
  np.testing.assert_allclose(rows.mean(0), 0.0, atol=0.05)
  np.testing.assert_allclose(np.cov(rows.T), np.eye(4), atol=0.06)


def test_features_are_a_function_of_the_key():
  draw = [orthogonal_features(jax.random.key(s), 5, 8) for s in (0, 0, 1)]
  np.testing.assert_array_equal(draw[0], draw[1])
  assert not np.allclose(draw[0], draw[2])


@pytest.mark.parametrize("length", [129, *thorough((127,), (128,), (257,))])
def test_chunks_leave_no_seam(length):
  """The causal form equals the quadratic one on both sides of a chunk's end."""
  query, key, value = _inputs(length)
  projection = orthogonal_features(jax.random.key(9), 12, 8)
  out = performer_attention(
    query, key, value, projection=projection, is_causal=True
  )

  expected = definitions.performer_attention(
    query, key, value, projection=projection, is_causal=True
  )
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_one_dominating_key_per_feature_is_not_lost():
  """Features whose scales lie 200 nats apart each keep their own key.

  With one scale for the whole state, the weaker feature underflows and a query
  that reads it alone gets 0/0.
  """
  projection = jnp.array([[20.0, 0.0], [0.0, 20.0]])
  key = jnp.array([[10.0, 0.0], [0.0, 1.0]])[None, :, None]
  value = jnp.array([[1.0, 0.0], [0.0, 1.0]])[None, :, None]
  query = jnp.array([[0.0, 0.0], [-10.0, 10.0]])[None, :, None]
  out = performer_attention(query, key, value, projection=projection, scale=1.0)
  np.testing.assert_allclose(out[0, 1, 0], [0.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("between", [0, 70])
def test_it_is_not_lost_in_the_chunk_or_in_the_state(between):
  """The same, causal: the query stands in the keys' chunk or in the next.

  Up to the largest feature of any key, what the query reads is e^-130.
  """
  projection = jnp.array([[20.0, 0.0], [0.0, 20.0]])
  hidden = ((0, 0), (0, between + 1), (0, 0), (0, 0))
  key = jnp.array([[10.0, 0.0], [0.0, 1.0]])[None, :, None]
  value = jnp.array([[1.0, 0.0], [0.0, 1.0]])[None, :, None]
  query = jnp.full((1, between + 3, 1, 2), jnp.array([-10.0, 10.0]))
  out = performer_attention(
    query,
    jnp.pad(key, hidden),
    jnp.pad(value, hidden),
    projection=projection,
    mask=(jnp.arange(between + 3) < 2)[None, None, None],
    is_causal=True,
    scale=1.0,
  )
  np.testing.assert_allclose(out[0, -1, 0], [0.0, 1.0], atol=1e-6)


def test_keys_far_from_every_feature_of_a_query_are_not_lost():
  """Scores in a chunk down to e^-1000: value, gradient and the future.

  Products of features are all 0 there in float32; the logarithms are exact to
  their own rounding, which is what the tolerance is for.
  """
  query, key, value = (np.asarray(x) for x in _inputs(70))
  query, key = 20 * query, 20 * key
  projection = orthogonal_features(jax.random.key(1), 24, 8)
  cotangent = np.random.default_rng(0).standard_normal(value.shape, np.float32)

  @jax.jit
  def run(*qkv):
    out, pullback = jax.vjp(
      lambda *qkv: performer_attention(
        *qkv, projection=projection, is_causal=True
      ),
      *qkv,
    )
    return out, pullback(jnp.asarray(cotangent))

  out, gradients = run(query, key, value)
  definition = functools.partial(
    definitions.performer_attention, projection=projection, is_causal=True
  )
  doubles = [np.asarray(x, np.float64) for x in (query, key, value)]
  np.testing.assert_allclose(out, definition(*doubles), atol=2e-4)

  norm = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in gradients))
  for i, gradient in enumerate(gradients):
    direction = np.random.default_rng(i).standard_normal(gradient.shape)
    ahead, behind = (
      definition(*doubles[:i], doubles[i] + h * direction, *doubles[i + 1 :])
      for h in (1e-6, -1e-6)
    )
    expected = ((ahead - behind) * cotangent).sum() / 2e-6
    assert abs((gradient * direction).sum() - expected) <= 1e-4 * norm

  later = [np.array(x) for x in (query, key, value)]
  for x in later:
    x[:, 40:] = 1.0
  np.testing.assert_array_equal(run(*later)[0][:, :40], out[:, :40])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_features": 0}, "num_features"),
    ({"kernel": "cosine"}, "kernel"),
  ],
)
def test_factory_refuses_bad_hyperparameters(unchecked, options, message):
  with pytest.raises(ValueError, match=message):
    performer(**options)


def test_function_refuses_bad_arguments(unchecked):
  query, key, value = _inputs(4)
  good = orthogonal_features(jax.random.key(0), 6, 8)
  with pytest.raises(ValueError, match="scale: expected > 0"):
    performer_attention(query, key, value, projection=good, scale=-1.0)


def test_cache_is_one_state_whatever_the_length():
  attention = performer(num_features=6)
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=100)
  variables = attention.init(jax.random.key(0), dims)
  sizes = [
    sum(
      x.nbytes
      for x in jax.tree.leaves(
        attention.init_cache(variables, 3, length, dims, jnp.bfloat16)
      )
    )
    for length in (10, 10_000)
  ]
  assert sizes[0] == sizes[1] == 4 * 3 * 2 * 6 * (8 + 2)
