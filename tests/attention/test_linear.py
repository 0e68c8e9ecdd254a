"""Linear attention beyond the contract: feature maps and what they are given."""

from functools import partial

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
  taylor_features,
)
from tests.attention.calls import assert_defined, draw, normal, pulled
from tests.refusals import assert_refused

(PROJECTION,) = normal((16, 8))
ATTEND = {
  "linear": linear_attention,
  "performer": partial(performer_attention, projection=PROJECTION),
}


# Ends of chunks (64 positions, 256 keys), of groups of four, and S on both
# sides of T.
@pytest.mark.parametrize(
  ("length", "source", "is_causal"), [(300, 257, False), (130, 200, True)]
)
def test_gradients_reach_what_the_feature_map_closes_over(
  length, source, is_causal
):
  def run(function, softplus):
    def of_tree(tree):
      qkv, matrix, scale = tree
      call = {"feature_map": lambda x: softplus(x @ matrix, 0.0)}
      return function(*qkv, **call, is_causal=is_causal, scale=scale)

    return of_tree

  (matrix,) = normal((6, 7), seed=3)
  qkv = draw(length, source, dim=6, value=5, batch=1)
  assert_defined(
    run(linear_attention, jnp.logaddexp),
    run(definitions.linear_attention, np.logaddexp),
    (qkv, matrix, jnp.float32(0.3)),
  )


def test_elu_plus_one_keeps_its_digits_and_hides_no_nan():
  x = np.array([-80.0, -8.0, 0.0, 3.0, np.nan], np.float32)
  expected = np.array([np.exp(-80.0), np.exp(-8.0), 1.0, 4.0, np.nan])
  found, slopes = jax.jit(jax.vmap(jax.value_and_grad(elu_plus_one)))(x)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  np.testing.assert_allclose(slopes[:4], np.minimum(expected, 1)[:4], rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_that_are_all_zero_see_nothing(is_causal):
  query, key, value = draw(9, value=5)
  query = np.array(query)
  query[:, 4] = -1.0
  apply = partial(linear("relu").apply, {}, is_causal=is_causal)
  out, gradients = pulled(apply, query, key, value)
  assert not out[:, 4].any()
  assert all(np.isfinite(x).all() for x in gradients)
  assert not gradients[0][:, 4].any()


def test_a_nan_shows():
  query, key, value = draw(9, value=5)
  key = np.array(key)
  key[0, 5, 0, 2] = np.nan
  attend = jax.jit(partial(linear_attention, is_causal=True))
  out = np.asarray(attend(query, key, value))
  assert np.isnan(out[0, 5:, :2]).all()
  assert np.isfinite(out[0, :5]).all()
  assert np.isfinite(out[0, :, 2:]).all()


def test_bad_options_are_refused(unchecked):
  qkv = draw(4)
  attend = partial(linear_attention, *qkv)
  assert_refused(attend, {"scale": 0.0}, {"feature_map": jnp.sum})
  assert_refused(linear, {"feature_map": "cos"})
  apply = partial(linear().apply, {}, *qkv)
  assert_refused(apply, {"feature_map": jnp.exp})
  sizes = [{"block_size": x} for x in (0, -1, 2.0, True, "256")]
  assert_refused(attend, *sizes)
  assert_refused(partial(ATTEND["performer"], *qkv), *sizes)


def test_hedgehog_with_trained_kernels():
  """The bare function on projections; the contract has the mechanism."""
  kernels = normal((4, 6, 6), (2, 6, 6), seed=5)
  options = {"is_causal": True, "scale": 1.0}

  def run(function, features, einsum):
    def of_tree(tree):
      (query, key, value), (query_kernel, key_kernel) = tree
      query = einsum("BTNH,NHI->BTNI", query, query_kernel)
      key = einsum("BTNH,NHI->BTNI", key, key_kernel)
      return function(query, key, value, feature_map=features, **options)

    return of_tree

  exact = definitions.linear_attention, definitions.linear.hedgehog_features
  assert_defined(
    run(linear_attention, hedgehog_features, jnp.einsum),
    run(*exact, np.einsum),
    (draw(70, dim=6, value=5, batch=1), kernels),
  )


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


def test_taylor_features_are_a_polynomial_of_the_scaled_product():
  """1 + s + s²/2 with s = q·k/√H, and as many features as there are monomials."""
  query, key = np.random.default_rng(0).normal(size=(2, 7, 5))
  s = np.sum(query * key, axis=-1) / 5**0.5
  expected = 1.0 + s + s**2 / 2.0
  mapped = [taylor_features(jnp.float32(x)) for x in (query, key)]
  assert mapped[0].shape == (7, 1 + 5 + 15)
  np.testing.assert_allclose(np.sum(mapped[0] * mapped[1], -1), expected, 1e-5)
  definition = definitions.linear.taylor_features
  products = np.sum(definition(query) * definition(key), axis=-1)
  np.testing.assert_allclose(products, expected, rtol=1e-12)
