"""Linear attention and performer: feature maps, blocks of any size, memory."""

from functools import partial
import re

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
  performer,
  performer_attention,
  taylor_features,
)
from attention.platform import backend
from attention.testing import assert_close
from tests.attention.calls import (
  assert_equal,
  assert_refused,
  draw,
  normal,
  pulled,
  random_mask,
)

(PROJECTION,) = normal((16, 8))
ATTEND = {
  "linear": linear_attention,
  "performer": partial(performer_attention, projection=PROJECTION),
}
both = pytest.mark.parametrize("name", ATTEND)
# Of each mechanism one direction.
one_direction = pytest.mark.parametrize(
  ("name", "is_causal"), [("linear", False), ("performer", True)]
)


def quadratic(query, key, value, *, feature_map, is_causal, scale):
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
  ("length", "source", "is_causal"), [(300, 257, False), (130, 200, True)]
)
def test_gradients_reach_what_the_feature_map_closes_over(
  length, source, is_causal
):
  def run(attend, qkv, matrix, scale):
    return attend(
      *qkv,
      feature_map=lambda x: jax.nn.softplus(x @ matrix),
      is_causal=is_causal,
      scale=scale,
    )

  (matrix,) = normal((6, 7), seed=3)
  qkv = draw(length, source, dim=6, value=5, batch=1)
  got, expected = (
    pulled(partial(run, attend), qkv, matrix, jnp.float32(0.3))
    for attend in (linear_attention, quadratic)
  )
  assert_equal(got, expected, 1e-5)


# A budget of 40,000 bytes is a few blocks a step, and so several steps.
@one_direction
def test_many_blocks_at_once_give_the_same_numbers(
  name, is_causal, monkeypatch
):
  qkv = draw(300, 517, value=5)
  call = {"mask": random_mask(1, 1, 1, 517, share=0.8), "is_causal": is_causal}
  expected = pulled(partial(ATTEND[name], **call), *qkv)
  fewer = backend.ACCELERATOR._replace(tile_bytes=40_000)
  monkeypatch.setattr(backend, "ACCELERATOR", fewer)
  call["block_size"] = 16 if is_causal else None
  with backend.tracing_for("gpu"):
    got = pulled(partial(ATTEND[name], **call), *qkv)
  assert_equal(got, expected, 1e-4)
  assert_close(got[0], expected[0], 1e-5)


@both
def test_future_does_not_reach_the_past_of_many_chunks(name):
  qkv = draw(300, value=5)
  later = [np.array(x) for x in qkv]
  for x in later:
    x[:, 200:] = 7.0
  with backend.tracing_for("gpu"):
    run = jax.jit(partial(ATTEND[name], is_causal=True))
    out, changed = run(*qkv), run(*later)
  np.testing.assert_array_equal(out[:, :200], changed[:, :200])


@one_direction
def test_any_block_size_gives_the_same_numbers(name, is_causal):
  """Also where it is part of a record's call."""
  qkv = draw(65, value=5)
  record, variables = linear(), {}
  if name == "performer":
    record = performer(16)
    variables = {"constants": {"projection": PROJECTION}}
  apply = partial(record.apply, variables, is_causal=is_causal)
  expected = pulled(apply, *qkv)
  for block_size in (1, 7) if is_causal else (7, 1000):
    got = pulled(partial(apply, block_size=block_size), *qkv)
    assert_equal(got, expected, 1e-4)
    assert_close(got[0], expected[0], 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@both
def test_it_lowers_for_accelerators_with_few_steps(name, is_causal):
  x = jax.ShapeDtypeStruct((1, 16_384, 8, 8), jnp.bfloat16)

  def loss(*qkv):
    out = ATTEND[name](*qkv, is_causal=is_causal)
    return jnp.sum(out.astype(jnp.float32))

  with backend.tracing_for("gpu"):
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, x, x)
    traced.lower(lowering_platforms=("cuda",))
  trips = [int(n) for n in re.findall(r"\blength=(\d+)", str(traced.jaxpr))]
  assert trips
  assert max(trips) <= 16


def test_performer_with_relu_is_linear_attention_with_its_features():
  qkv = draw(70, value=5)

  def features(x):
    return jnp.maximum(x @ PROJECTION.T / 16**0.5, 0.0) + 1e-3

  got, expected = (
    jax.jit(attend)(*qkv)
    for attend in (
      partial(ATTEND["performer"], kernel="relu"),
      partial(linear_attention, feature_map=features, scale=8**-0.5),
    )
  )
  assert_close(got, expected, 1e-6)


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


def test_cache_is_one_state_whatever_the_length():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=100)
  for length in (10, 10_000):
    cache = linear().init_cache({}, 3, length, dims, jnp.bfloat16)
    sizes = [x.nbytes for x in jax.tree.leaves(cache)]
    assert sum(sizes) == 4 * 3 * 2 * 8 * (8 + 1)


def test_bad_options_are_refused(unchecked):
  qkv = draw(4)
  attend = partial(linear_attention, *qkv)
  assert_refused(
    attend,
    (
      ("scale: expected > 0", {"scale": 0.0}),
      ("feature_map: expected a function of", {"feature_map": jnp.sum}),
    ),
  )
  assert_refused(linear, [("feature_map: .* got 'cos", {"feature_map": "cos"})])
  assert_refused(
    partial(linear().apply, {}, *qkv),
    [
      ("feature_map: .+; call the attention function", {"feature_map": jnp.exp})
    ],
  )
  for function in (attend, partial(ATTEND["performer"], *qkv)):
    for size in (0, -1, 2.0, True, "256"):
      assert_refused(function, [("block_size: exp", {"block_size": size})])


def test_hedgehog_with_trained_kernels():
  """The record, the bare function on projections, and the definition agree."""
  qkv = draw(70, dim=6, value=5, batch=1)
  kernels = normal((4, 6, 6), (2, 6, 6), seed=5)
  params = dict(zip(("query_kernel", "key_kernel"), kernels, strict=True))

  def projected(query, key, params):
    return (
      jnp.einsum("BTNH,NHI->BTNI", query, params["query_kernel"]),
      jnp.einsum("BTNH,NHI->BTNI", key, params["key_kernel"]),
    )

  def record(query, key, value, params):
    apply = linear("hedgehog").apply
    return apply({"params": params}, query, key, value, is_causal=True)

  def on_projections(attend, query, key, value, params):
    call = {"feature_map": hedgehog_features, "is_causal": True, "scale": 1.0}
    return attend(*projected(query, key, params), value, **call)

  expected = pulled(partial(on_projections, quadratic), *qkv, params)
  for attend in (record, partial(on_projections, linear_attention)):
    assert_equal(pulled(attend, *qkv, params), expected, 1e-5)
  defined = definitions.linear_attention(
    *map(np.float64, jax.jit(projected)(*qkv[:2], params)),
    qkv[2],
    feature_map=definitions.linear.hedgehog_features,
    is_causal=True,
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
