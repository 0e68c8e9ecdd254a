"""Window and linear attention beside the contract suite: trained kernels too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  sliding_window,
  window_linear,
  window_linear_attention,
)
from attention import mechanism as mechanisms
from attention.platform import backend
from attention.testing import assert_close
import models
from tests.attention.calls import assert_refused, in_float64, normal, pulled
from tests.models import tiny

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 6, 5


def draw(length, source=None, *, hidden=0.0, size=1.0):
  """[query, key, value], the trained arrays, and a key mask `[B, 1, 1, S]`."""
  source = source or length
  *qkv, query_kernel, key_kernel, mix = map(
    np.asarray,
    normal(
      (2, length, HEADS, HEAD_DIM),
      (2, source, KV_HEADS, HEAD_DIM),
      (2, source, KV_HEADS, VALUE_DIM),
      (HEADS, HEAD_DIM, HEAD_DIM),
      (KV_HEADS, HEAD_DIM, HEAD_DIM),
      (HEADS,),
    ),
  )
  qkv = [size * qkv[0], size * qkv[1], qkv[2]]
  trained = {"query_kernel": query_kernel, "key_kernel": key_kernel, "mix": mix}
  mask = np.random.default_rng(1).random((2, 1, 1, source)) >= hidden
  return qkv, trained, jnp.asarray(mask)


def as_matrix(query, key, value, mask, *, window, scale, **trained):
  """The definition as whole T×S matrices, for autodiff."""
  key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
  key_kernel = jnp.repeat(trained["key_kernel"], HEADS // KV_HEADS, axis=0)

  def features(x, kernel):
    x = jnp.einsum("BTNH,NHI->BTNI", x, kernel)
    return jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1)

  distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
  seen = mask & (distance >= 0)[None, None]
  near = seen & (distance < window)[None, None]
  logits = scale * jnp.einsum("BTNH,BSNH->BNTS", query, key)
  largest = jnp.max(logits, axis=-1, keepdims=True, where=near, initial=-1e30)
  # Masked before the exponential, so that no inf has a gradient.
  share = jax.nn.sigmoid(trained["mix"])[None, :, None, None]
  exponentials = share * jnp.exp(jnp.where(near, logits - largest, -jnp.inf))
  products = jnp.einsum(
    "BTNM,BSNM->BNTS",
    features(query, trained["query_kernel"]),
    features(key, key_kernel),
  )
  weights = exponentials + jnp.where(seen & ~near, products, 0.0)
  total = weights.sum(axis=-1, keepdims=True)
  weights /= jnp.where(total == 0.0, 1.0, total)
  return jnp.einsum("BNTS,BSNV->BTNV", weights, value)


def with_gradients(function, qkv, trained, mask, **options):
  def attend(qkv, trained):
    return function(*qkv, mask=mask, **trained, **options)

  return pulled(attend, qkv, trained)


fast = functools.partial(
  with_gradients, functools.partial(window_linear_attention, is_causal=True)
)
naive = functools.partial(with_gradients, as_matrix)
define = functools.partial(definitions.window_linear_attention, is_causal=True)


def assert_equal(got, expected, tolerance=1e-5):
  """Outputs, and gradients up to the largest of them: some are 0 exactly."""
  (out, gradients), (expected_out, expected_gradients) = got, expected
  assert_close(out, expected_out, tolerance)
  expected = jax.tree.leaves(expected_gradients)
  largest = max(np.abs(x).max() for x in expected)
  named = jax.tree_util.tree_leaves_with_path(gradients)
  for (path, x), y in zip(named, expected, strict=True):
    error = np.abs(x - y).max()
    assert error <= tolerance * largest, (jax.tree_util.keystr(path), error)


# Windows around T, a prime number of tiles, S on both sides of T. In one case all
# keys are alike, so that they share the gradient of the largest logit.
@pytest.mark.parametrize(
  ("length", "source", "window", "alike"),
  [
    (7, 7, 8, False),
    (131, 131, 17, False),
    (41, 90, 7, False),
    (23, 23, 4, True),
  ],
)
def test_values_and_all_gradients(length, source, window, alike):
  """With 0.6 of the keys hidden, some windows are empty, and some rows."""
  qkv, trained, mask = draw(length, source, hidden=0.0 if alike else 0.6)
  if alike:
    qkv[1] = np.repeat(qkv[1][:, :1], source, axis=1)
  options = {"window": window, "scale": 0.7}
  got = fast(qkv, trained, mask, **options)
  exact = in_float64(
    lambda *arrays: naive(*arrays, mask, **options), qkv, trained
  )
  assert_equal(got, exact)
  assert_close(got[0], define(*qkv, **trained, mask=mask, **options), 1e-5)


def test_huge_logits():
  """Logits near 10⁴, features that vanish, windows that are empty."""
  qkv, trained, mask = draw(61, hidden=0.7, size=100.0)
  out, gradients = fast(qkv, trained, mask, window=4)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  defined = define(*qkv, **trained, window=4, mask=mask)
  # Products of features that float32 rounds to nothing count as no key.
  is_lost = ~out.any(axis=-1) & defined.any(axis=-1)
  assert is_lost.mean() < 0.05
  assert_close(out[~is_lost], defined[~is_lost], 1e-3)


def test_a_window_over_everything_is_dense_attention():
  """And without near keys it is linear attention of the past."""
  qkv, trained, mask = draw(40, hidden=0.3)
  run = jax.jit(
    functools.partial(window_linear_attention, is_causal=True),
    static_argnames="window",
  )
  dense = definitions.dense_attention(*qkv, mask=mask, is_causal=True)
  assert_close(run(*qkv, **trained, window=40, mask=mask), dense, 1e-5)
  query, key, value = qkv
  trained["mix"] = np.full(HEADS, -60.0, np.float32)  # γ = e^-60
  out = run(*qkv, **trained, window=3)
  expected = definitions.linear_attention(
    np.einsum("BTNH,NHI->BTNI", query[:, 3:], trained["query_kernel"]),
    np.einsum("BTNH,NHI->BTNI", key[:, :-3], trained["key_kernel"]),
    value[:, :-3],
    feature_map=definitions.linear.hedgehog_features,
    is_causal=True,
  )
  assert_close(out[:, 3:], expected, 1e-5)


@pytest.mark.parametrize("window", [1, 19])
def test_decoding_with_trained_kernels(window):
  (query, key, value), trained, _ = draw(20)
  value = np.concatenate([value, value[..., :1]], axis=-1)
  dims = Dims(HEADS, KV_HEADS, HEAD_DIM, 20)
  mechanism, variables = window_linear(window), {"params": trained}
  cache = mechanism.init_cache(variables, 2, 20, dims, jnp.float32)

  def step(cache, rows):
    rows = (x[:, None] for x in rows)
    out, cache = mechanism.decode(variables, cache, *rows)
    return cache, out[:, 0]

  rows = [np.moveaxis(x, 1, 0) for x in (query, key, value)]
  _, outs = jax.jit(lambda *x: jax.lax.scan(step, *x))(cache, rows)
  expected = define(query, key, value, **trained, window=window)
  assert_close(np.moveaxis(outs, 0, 1), expected, 1e-5)


def test_the_cache_is_a_window_and_a_state_whatever_the_length():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=10_000)
  mechanism = window_linear(window=16)
  variables = mechanism.init(jax.random.key(0), dims)
  ring, state = 2 * 2 * 16 * 8 * 2, 4 * 2 * (2 * 8) * (8 + 1)
  for length in (100, 10_000):
    cache = mechanism.init_cache(variables, 3, length, dims, jnp.bfloat16)
    sizes = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert sizes == 3 * (ring + state + 4)


def test_many_tiles_at_once_give_the_same_numbers(monkeypatch):
  arguments = draw(300, hidden=0.3)
  expected = fast(*arguments, window=33)
  fewer = backend.ACCELERATOR._replace(tile_bytes=40_000)
  for accelerator in (backend.ACCELERATOR, fewer):
    monkeypatch.setattr(backend, "ACCELERATOR", accelerator)
    with backend.tracing_for("gpu"):
      assert_equal(fast(*arguments, window=33), expected, 2e-5)


def test_kernels_start_as_the_identity_and_the_share_at_a_tenth():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=6, max_length=100)
  params = window_linear().init(jax.random.key(0), dims)["params"]
  for name, heads in (("query_kernel", 4), ("key_kernel", 2)):
    np.testing.assert_array_equal(params[name], np.stack([np.eye(6)] * heads))
  np.testing.assert_allclose(1 / (1 + np.exp(-params["mix"])), [0.1] * 4, 1e-6)


def test_wrong_arguments_are_refused(unchecked):
  qkv, trained, mask = draw(9)
  square = np.zeros((3, HEAD_DIM, HEAD_DIM), np.float32)
  windows = (0, -1, 2.0, (2, 0), True)
  given = {**trained, "window": 3, "is_causal": True}
  assert_refused(
    lambda **change: window_linear_attention(*qkv, **given | change),
    (
      ("query_kernel: expected .*, got shape", {"query_kernel": square}),
      ("key_kernel: expected .*, got shape", {"key_kernel": square}),
      ("mix: expected .*, got shape", {"mix": np.zeros(3, np.float32)}),
      *(("window: expected an int of at", {"window": x}) for x in windows),
      ("mask: expected a key mask", {"mask": np.repeat(mask, 9, axis=2)}),
      ("is_causal: expected True, got False", {"is_causal": False}),
    ),
  )
  with pytest.raises(ValueError, match=r"^window: 20 covers all 20"):
    window_linear(20).init(jax.random.key(0), Dims(4, 2, 6, 20))
  apply = functools.partial(window_linear(3).apply, {"params": trained}, *qkv)
  with pytest.raises(ValueError, match=r"^window: window_linear sets it"):
    apply(is_causal=True, window=4)


def test_an_encoder_refuses_what_is_causal_only():
  assert mechanisms.directions(window_linear()) == (True,)
  assert mechanisms.directions(sliding_window()) == (False, True)
  assert not mechanisms.can(window_linear(), "bidirectional")
  one = models.AttentionConfig("window_linear", {"window": 3})
  with pytest.raises(
    ValueError, match=r"^encoder_attention: .* attend in both directions; "
  ):
    tiny.create("encoder", encoder_attention=one)
  assert models.slots(tiny.create("decoder", decoder_attention=one).config) == (
    "window_linear"
  )
