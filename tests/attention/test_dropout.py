"""Which weights are dropped follows from positions, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  Dims,
  as_attention_fn,
  dense_attention,
  flash_attention,
  gates_from_keys,
  lsh_attention,
)
from attention.mechanism import supporting
from attention.softmax import dropout
from tests.attention.calls import draw

KEY = jax.random.key(3)
of_pairs = jax.jit(dropout.pair_factors, static_argnums=(1, 2, 3))


def kept(queries, keys, key=KEY):
  return np.asarray(of_pairs(key, 0.3, 2, 3, queries, keys))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_rate_and_independence(kind):
  places = np.arange(300), np.arange(200)
  found = kept(*places, key=jax.random.key(0, impl=kind))
  assert set(np.unique(found)) == {0.0, np.float32(1 / 0.7)}
  is_kept = found > 0
  np.testing.assert_allclose(is_kept.mean(axis=(2, 3)), 0.7, atol=0.01)
  rows = is_kept.reshape(6, -1).astype(float)
  assert np.abs(np.corrcoef(rows) - np.eye(6)).max() < 0.02
  of_query = is_kept[0, 0].astype(float)
  assert np.abs(np.corrcoef(of_query) - np.eye(300)).mean() < 0.07
  other = kept(*places, key=jax.random.key(1))
  assert abs(np.mean((other > 0) == is_kept) - (0.7**2 + 0.3**2)) < 0.01


def test_a_stretch_is_that_of_the_whole():
  whole = kept(np.arange(40), np.arange(50))
  part = kept(np.arange(7, 20), np.arange(31, 45))
  np.testing.assert_array_equal(part, whole[:, :, 7:20, 31:45])


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_and_flash_drop_alike(is_causal):
  call = {"is_causal": is_causal, "dropout_rate": 0.4, "dropout_rng": KEY}
  expected = jax.jit(functools.partial(dense_attention, **call))(*draw(37))
  for block_size in (None, 5, (7, 16)):
    flash = functools.partial(flash_attention, block_size=block_size, **call)
    np.testing.assert_allclose(jax.jit(flash)(*draw(37)), expected, atol=2e-6)


def test_keys_that_are_refused():
  with pytest.raises(ValueError, match=r"^key: expected a random key"):
    dropout.pair_factors(None, 0.3, 2, 3, jnp.arange(2), jnp.arange(2))
  x = jnp.asarray(np.ones((2, 8, 4, 8), np.float32))
  call = {"dropout_rate": 0.5, "dropout_rng": jax.random.split(KEY, (2, 4))}
  with pytest.raises(ValueError, match=r"^dropout_rng: .* got shape \(2, 4\)"):
    dense_attention(x, x, x, **call)
  # Each head has an order of its own.
  call = {"dropout_rate": 0.5, "dropout_rng": dropout.shared(KEY)}
  call |= {"rotations": jnp.ones((1, 8, 2)), "chunk_size": 4}
  with pytest.raises(ValueError, match=r"^dropout_rng: .*broadcast_dropout"):
    jax.eval_shape(lambda: lsh_attention(x, x, **call))


SETTINGS = {
  "sliding_window": {"window": 2, "dilation": 2},
  "bigbird": {"block_size": 2, "num_random": 1},
  "window_2d": {"window": 3},
  "strided_2d": {"stride": 2},
  "additive": {"width": 4},
}


@pytest.mark.parametrize(
  "name", [n for n in supporting(ATTENTIONS, "dropout") if n != "lsh"]
)
def test_broadcast_dropout_drops_the_same_pairs_everywhere(name):
  """As Flax's default does, in all examples and heads."""
  record = gates_from_keys(ATTENTIONS[name](**SETTINGS.get(name, {})))
  dims = Dims(4, 2, 8, 16, 16)
  variables = jax.jit(lambda key: record.init(key, dims))(KEY)
  fn = as_attention_fn(record, variables)
  rng = np.random.default_rng(0)
  query, key = (
    rng.standard_normal((3, 16, heads, 8), np.float32) for heads in (4, 2)
  )
  value = np.broadcast_to(np.eye(16, dtype=np.float32)[:, None], (3, 16, 2, 16))

  @functools.partial(jax.jit, static_argnames="rate")
  def weights(seed, rate):
    draw = jax.random.PRNGKey(seed)
    return fn(query, key, value, dropout_rate=rate, dropout_rng=draw)

  whole, dropped = np.asarray(weights(0, 0.0)), np.asarray(weights(0, 0.4))
  is_kept, is_seen = dropped > 0, whole > 1e-6
  np.testing.assert_allclose(dropped[is_kept], whole[is_kept] / 0.6, rtol=1e-4)
  kept, seen = (x.sum((0, 2)) for x in (is_kept, is_seen))
  np.testing.assert_array_equal(kept[kept > 0], seen[kept > 0])
  assert 0.4 < np.mean(kept[seen > 0] > 0) < 0.8
  assert (np.asarray(weights(1, 0.4)) != dropped).any()
