"""Linear attention beside the contract suite: feature maps, blocks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  elu_plus_one,
  hedgehog_features,
  linear,
  linear_attention,
  performer_attention,
)
from attention.testing import assert_close
from tests.attention.forms import thorough


def _inputs(length, source_length=None, seed=0):
  rng = np.random.default_rng(seed)
  source_length = source_length or length
  shapes = (length, 4, 6), (source_length, 2, 6), (source_length, 2, 5)
  return [
    jnp.asarray(rng.standard_normal((1, *shape), np.float32))
    for shape in shapes
  ]


def _quadratic(query, key, value, feature_map, is_causal, scale):
  """The same as a T×S matrix, for autodiff."""
  key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
  query, key = (feature_map(x * scale**0.5) for x in (query, key))
  weights = jnp.einsum("BTNM,BSNM->BNTS", query, key)
  if is_causal:
    weights *= np.tri(*weights.shape[2:], dtype=np.float32)[None, None]
  weights /= weights.sum(axis=-1, keepdims=True)
  return jnp.einsum("BNTS,BSNV->BTNV", weights, value)


# Ends of chunks (64 positions, 256 keys), of groups of four, and S on both
# sides of T.
@pytest.mark.parametrize(
  ("length", "source_length", "is_causal"),
  [
    (300, 257, False),
    (130, 200, True),
    *thorough((321, 321, True), (192, 128, True)),
  ],
)
def test_gradients_reach_what_the_feature_map_closes_over(
  length, source_length, is_causal
):
  matrix = np.random.default_rng(3).standard_normal((6, 7), np.float32)

  def run(attend, qkv, matrix, scale):
    return attend(
      *qkv,
      feature_map=lambda x: jax.nn.softplus(x @ matrix),
      is_causal=is_causal,
      scale=scale,
    )

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(attend, *leaves):
    out, pullback = jax.vjp(functools.partial(run, attend), *leaves)
    return out, pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

  leaves = _inputs(length, source_length), matrix, jnp.float32(0.3)
  got, expected = (
    jax.tree.leaves(gradients(attend, *leaves))
    for attend in (linear_attention, _quadratic)
  )
  for x, y in zip(got, expected, strict=True):
    assert_close(x, y, 1e-5)


def test_performer_with_relu_is_linear_attention_with_its_features():
  query, key, value = _inputs(70)
  projection = np.random.default_rng(1).standard_normal((8, 6), np.float32)

  def features(x):
    return jnp.maximum(x @ projection.T / 8**0.5, 0.0) + 1e-3

  got = performer_attention(
    query, key, value, projection=jnp.asarray(projection), kernel="relu"
  )
  expected = linear_attention(
    query, key, value, feature_map=features, scale=6**-0.5
  )
  assert_close(got, expected, 1e-6)


def test_elu_plus_one_keeps_its_digits_and_hides_no_nan():
  x = jnp.array([-80.0, -8.0, 0.0, 3.0])
  expected = np.array([np.exp(-80.0), np.exp(-8.0), 1.0, 4.0])
  np.testing.assert_allclose(elu_plus_one(x), expected, rtol=1e-5)
  slopes = jax.vmap(jax.grad(elu_plus_one))(x)
  np.testing.assert_allclose(slopes, np.minimum(expected, 1), rtol=1e-5)
  assert np.isnan(elu_plus_one(jnp.float32(jnp.nan)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_that_are_all_zero_see_nothing(is_causal):
  query, key, value = _inputs(9)
  query = query.at[:, 4].set(-1.0)
  attend = linear("relu").apply

  def call(*qkv):
    return attend({}, *qkv, is_causal=is_causal)

  @jax.jit
  def run(*qkv):
    out, pullback = jax.vjp(call, *qkv)
    return out, pullback(jnp.ones_like(out))

  out, gradients = run(query, key, value)
  assert not np.asarray(out[:, 4]).any()
  assert all(np.isfinite(x).all() for x in gradients)
  assert not np.asarray(gradients[0][:, 4]).any()


def test_a_nan_shows():
  query, key, value = _inputs(9)
  key = key.at[0, 5, 0, 2].set(jnp.nan)
  out = np.asarray(linear_attention(query, key, value, is_causal=True))
  assert np.isnan(out[0, 5:, :2]).all()
  assert np.isfinite(out[0, :5]).all()
  assert np.isfinite(out[0, :, 2:]).all()


def test_cache_is_one_state_whatever_the_length():
  attention = linear()
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=100)
  for length in (10, 10_000):
    cache = attention.init_cache({}, 3, length, dims, jnp.bfloat16)
    sizes = [x.nbytes for x in jax.tree.leaves(cache)]
    assert sum(sizes) == 4 * 3 * 2 * 8 * (8 + 1)


def test_bad_options_are_refused(unchecked):
  query, key, value = _inputs(4)
  with pytest.raises(ValueError, match=r"feature_map: .* got 'cosine'"):
    linear("cosine")
  with pytest.raises(ValueError, match="scale: expected > 0"):
    linear_attention(query, key, value, scale=0.0)
  with pytest.raises(ValueError, match=r"feature_map: .+; pass it to linear"):
    linear().apply({}, query, key, value, feature_map=jnp.exp)
  with pytest.raises(ValueError, match="feature_map: expected a function of"):
    linear_attention(query, key, value, feature_map=jnp.sum)


@pytest.mark.parametrize("is_causal", [*thorough((False,)), True])
def test_hedgehog_with_trained_kernels(is_causal):
  """The record, the bare function on projections, and the definition agree."""
  query, key, value = _inputs(70)
  rng = np.random.default_rng(5)
  params = {
    name: rng.standard_normal((heads, 6, 6), np.float32)
    for name, heads in (("query_kernel", 4), ("key_kernel", 2))
  }

  def projected(query, key, params):
    return (
      jnp.einsum("BTNH,NHI->BTNI", query, params["query_kernel"]),
      jnp.einsum("BTNH,NHI->BTNI", key, params["key_kernel"]),
    )

  def record(query, key, value, params):
    apply = linear("hedgehog").apply
    return apply({"params": params}, query, key, value, is_causal=is_causal)

  def bare(query, key, value, params):
    return linear_attention(
      *projected(query, key, params),
      value,
      feature_map=hedgehog_features,
      is_causal=is_causal,
    )

  def naive(query, key, value, params):
    projections = projected(query, key, params)
    return _quadratic(*projections, value, hedgehog_features, is_causal, 1.0)

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(attend, *arguments):
    out, pullback = jax.vjp(attend, *arguments)
    return out, pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

  arguments = query, key, value, params
  expected = gradients(naive, *arguments)
  for attend in (record, bare):
    got = gradients(attend, *arguments)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
      assert_close(x, y, 1e-5)
  defined = definitions.linear_attention(
    *map(np.float64, projected(query, key, params)),
    value,
    feature_map=definitions.linear.hedgehog_features,
    is_causal=is_causal,
  )
  assert_close(expected[0], defined, 1e-5)


def test_only_hedgehog_by_name_has_variables():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=6, max_length=9)
  made = linear("hedgehog").init(jax.random.key(0), dims)
  shapes = jax.tree.map(lambda x: x.shape, made)
  assert shapes == {
    "params": {"query_kernel": (4, 6, 6), "key_kernel": (2, 6, 6)}
  }
  for kernel in made["params"].values():
    np.testing.assert_array_equal(kernel, np.stack([np.eye(6)] * len(kernel)))
  for feature_map in ("elu", hedgehog_features):
    assert linear(feature_map).init(jax.random.key(0), dims) == {}
