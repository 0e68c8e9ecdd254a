"""Window and linear attention beside the contract suite: trained kernels too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  dense_attention,
  hedgehog_features,
  linear_attention,
  platform,
  plug,
  sliding_window,
  window_linear,
  window_linear_attention,
)
from attention.testing import assert_close
import models
from tests.attention.forms import thorough
from tests.models import tiny

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 6, 5

compiled = jax.jit(
  window_linear_attention, static_argnames=("window", "is_causal")
)


def draw(length, source_length=None, *, hidden=0.0, size=1.0, seed=0):
  """(query, key, value), the trained arrays, and a key mask `[B, 1, 1, S]`."""
  rng = np.random.default_rng(seed)
  source_length = source_length or length
  qkv = [
    np.float32(scale * rng.standard_normal((2, *shape)))
    for scale, shape in (
      (size, (length, HEADS, HEAD_DIM)),
      (size, (source_length, KV_HEADS, HEAD_DIM)),
      (1.0, (source_length, KV_HEADS, VALUE_DIM)),
    )
  ]
  trained = {
    "query_kernel": rng.standard_normal((HEADS, HEAD_DIM, HEAD_DIM)),
    "key_kernel": rng.standard_normal((KV_HEADS, HEAD_DIM, HEAD_DIM)),
    "mix": rng.standard_normal(HEADS),
  }
  trained = {name: np.float32(x) for name, x in trained.items()}
  mask = rng.random((2, 1, 1, source_length)) >= hidden
  return qkv, trained, mask


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


def differentiated(attend):
  """The compiled call with its gradients, `mask` an argument like others."""

  @jax.jit
  def run(qkv, trained, cotangent, mask):
    out, pullback = jax.vjp(
      lambda qkv, trained: attend(*qkv, mask=mask, **trained), qkv, trained
    )
    return out, pullback(cotangent)

  return run


def with_gradients(attend, *arguments):
  return jax.device_get(differentiated(attend)(*arguments))


def in_float64(run, *arguments):
  with jax.enable_x64(True):
    *floats, mask = arguments
    return jax.device_get(run(*jax.tree.map(np.float64, floats), mask))


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


# One position, windows around T, a prime number of tiles, S on both sides of T.
SHAPES = [
  (7, 7, 8),
  (131, 131, 17),
  (41, 90, 7),
  *thorough((1, 1, 1), (7, 7, 6), (7, 7, 7), (97, 97, 1), (131, 131, 130)),
  *thorough((90, 41, 7)),
]


@pytest.mark.parametrize(("length", "source_length", "window"), SHAPES)
def test_values_and_all_gradients(length, source_length, window):
  """With 0.6 of the keys hidden, some windows are empty, and some rows."""
  shape = (2, length, HEADS, VALUE_DIM)
  cotangent = np.random.default_rng(1).standard_normal(shape, np.float32)
  options = {"window": window, "scale": 0.7}
  fast = differentiated(
    functools.partial(window_linear_attention, is_causal=True, **options)
  )
  naive = differentiated(functools.partial(as_matrix, **options))
  for hidden in (0.0, 0.6):
    qkv, trained, mask = draw(length, source_length, hidden=hidden)
    got = jax.device_get(fast(qkv, trained, cotangent, mask))
    assert_equal(got, in_float64(naive, qkv, trained, cotangent, mask))
    defined = definitions.window_linear_attention(
      *qkv, **trained, mask=mask, is_causal=True, **options
    )
    assert_close(got[0], defined, 1e-5)


def test_equal_keys_share_the_gradient_of_the_largest_logit():
  qkv, trained, mask = draw(23)
  qkv[1] = np.repeat(qkv[1][:, :1], 23, axis=1)
  cotangent = np.random.default_rng(1).standard_normal(
    (2, 23, HEADS, VALUE_DIM), np.float32
  )
  fast = functools.partial(window_linear_attention, window=4, is_causal=True)
  naive = functools.partial(as_matrix, window=4, scale=HEAD_DIM**-0.5)
  assert_equal(
    with_gradients(fast, qkv, trained, cotangent, mask),
    in_float64(differentiated(naive), qkv, trained, cotangent, mask),
  )


def test_huge_logits():
  """Logits near 10⁴, features that vanish, windows that are empty."""
  qkv, trained, mask = draw(61, hidden=0.7, size=100.0)
  cotangent = np.ones((2, 61, HEADS, VALUE_DIM), np.float32)
  attend = functools.partial(window_linear_attention, window=4, is_causal=True)
  out, gradients = with_gradients(attend, qkv, trained, cotangent, mask)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  defined = definitions.window_linear_attention(
    *qkv, **trained, window=4, mask=mask, is_causal=True
  )
  # Products of features that float32 rounds to nothing count as no key.
  is_lost = ~out.any(axis=-1) & defined.any(axis=-1)
  assert is_lost.mean() < 0.05
  assert_close(out[~is_lost], defined[~is_lost], 1e-3)


def test_a_window_over_everything_is_dense_attention():
  qkv, trained, mask = draw(40, hidden=0.3)
  out = compiled(*qkv, **trained, window=40, mask=mask, is_causal=True)
  dense = jax.jit(functools.partial(dense_attention, is_causal=True))
  assert_close(out, dense(*qkv, mask=mask), 1e-5)


def test_without_near_keys_it_is_linear_attention_of_the_past():
  (query, key, value), trained, _ = draw(40)
  trained["mix"] = np.full(HEADS, -60.0, np.float32)  # γ = e^-60
  out = compiled(query, key, value, **trained, window=3, is_causal=True)
  projected = (
    jnp.einsum("BTNH,NHI->BTNI", x, kernel)
    for x, kernel in (
      (query[:, 3:], trained["query_kernel"]),
      (key[:, :-3], trained["key_kernel"]),
    )
  )
  linear = functools.partial(
    linear_attention, feature_map=hedgehog_features, is_causal=True
  )
  expected = jax.jit(linear)(*projected, value[:, :-3])
  assert_close(out[:, 3:], expected, 1e-5)


@pytest.mark.parametrize(("window", "kv_heads"), [(1, 4), (5, 2), (19, 1)])
def test_decoding_with_trained_kernels(window, kv_heads):
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, 20, n, HEAD_DIM)), jnp.float32)
    for n in (HEADS, kv_heads, kv_heads)
  )
  dims = Dims(HEADS, kv_heads, HEAD_DIM, 20)
  mechanism = window_linear(window)
  variables = jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32),
    jax.eval_shape(lambda: mechanism.init(jax.random.key(0), dims)),
  )
  cache = mechanism.init_cache(variables, 2, 20, dims, jnp.float32)
  step = jax.jit(mechanism.decode)
  outs = []
  for t in range(20):
    out, cache = step(
      variables, cache, *(x[:, t : t + 1] for x in (query, key, value))
    )
    outs.append(out)
  apply = jax.jit(functools.partial(mechanism.apply, is_causal=True))
  expected = apply(variables, query, key, value)
  assert_close(jnp.concatenate(outs, axis=1), expected, 1e-5)


def test_the_cache_is_a_window_and_a_state_whatever_the_length():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=10_000)
  mechanism = window_linear(window=16)
  variables = mechanism.init(jax.random.key(0), dims)
  for length in (100, 10_000):
    cache = mechanism.init_cache(variables, 3, length, dims, jnp.bfloat16)
    sizes = sum(x.nbytes for x in jax.tree.leaves(cache))
    ring, state = 2 * 2 * 16 * 8 * 2, 4 * 2 * (2 * 8) * (8 + 1)
    assert sizes == 3 * (ring + state + 4)


def test_many_tiles_at_once_give_the_same_numbers(monkeypatch):
  qkv, trained, mask = draw(300, hidden=0.3)
  cotangent = np.ones((2, 300, HEADS, VALUE_DIM), np.float32)
  attend = functools.partial(window_linear_attention, window=33, is_causal=True)
  arguments = qkv, trained, cotangent, mask
  expected = with_gradients(attend, *arguments)
  fewer = platform.ACCELERATOR._replace(tile_bytes=40_000)
  for accelerator in (platform.ACCELERATOR, fewer):
    monkeypatch.setattr(platform, "ACCELERATOR", accelerator)
    with platform.tracing_for("gpu"):
      got = with_gradients(attend, *arguments)
    assert_equal(got, expected, 2e-5)


def test_kernels_start_as_the_identity_and_the_share_at_a_tenth():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=6, max_length=100)
  params = window_linear().init(jax.random.key(0), dims)["params"]
  for name, heads in (("query_kernel", 4), ("key_kernel", 2)):
    np.testing.assert_array_equal(params[name], np.stack([np.eye(6)] * heads))
  np.testing.assert_allclose(jax.nn.sigmoid(params["mix"]), [0.1] * 4, 1e-6)


def test_wrong_arguments_are_refused(unchecked):
  qkv, trained, mask = draw(9)
  attend = functools.partial(window_linear_attention, *qkv, is_causal=True)
  square = np.zeros((3, HEAD_DIM, HEAD_DIM), np.float32)
  for name, wrong in (
    ("query_kernel", square),
    ("key_kernel", square),
    ("mix", np.zeros(3, np.float32)),
  ):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got shape"):
      attend(**{**trained, name: wrong}, window=3)
  for wrong in (0, -1, 2.0, (2, 0), True):
    with pytest.raises(ValueError, match=r"^window: expected an int of at"):
      attend(**trained, window=wrong)
  with pytest.raises(ValueError, match=r"^mask: expected a key mask"):
    attend(**trained, window=3, mask=jnp.repeat(mask, 9, axis=2))
  with pytest.raises(ValueError, match=r"^is_causal: expected True, got False"):
    window_linear_attention(*qkv, **trained, window=3)
  with pytest.raises(ValueError, match=r"^window: 20 has room for all 20"):
    window_linear(20).init(jax.random.key(0), Dims(4, 2, 6, 20))
  params = {"params": trained}
  with pytest.raises(ValueError, match=r"^window: the record of"):
    window_linear(3).apply(params, *qkv, is_causal=True, window=4)


def test_an_encoder_refuses_what_is_causal_only():
  assert plug.directions(window_linear()) == (True,)
  assert plug.directions(sliding_window()) == (False, True)
  assert not plug.can(window_linear(), "bidirectional")
  one = models.AttentionConfig("window_linear", {"window": 3})
  with pytest.raises(
    ValueError, match=r"^encoder_attention: .* attend in both directions; "
  ):
    tiny.create("encoder", encoder_attention=one)
  assert models.slots(tiny.create("decoder", decoder_attention=one).config) == (
    "window_linear"
  )
