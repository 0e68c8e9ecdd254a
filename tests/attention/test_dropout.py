"""Which weights are dropped follows from positions, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import dense_attention, dropout, flash_attention

KEY = jax.random.key(3)


def kept(queries, keys, batch=2, heads=3, rate=0.3, key=KEY):
  return np.asarray(dropout.of_pairs(key, rate, batch, heads, queries, keys))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_rate_and_independence(kind):
  key = jax.random.key(0, impl=kind)
  found = kept(jnp.arange(300), jnp.arange(200), key=key)
  assert set(np.unique(found)) == {0.0, np.float32(1 / 0.7)}
  is_kept = found > 0
  np.testing.assert_allclose(is_kept.mean(axis=(2, 3)), 0.7, atol=0.01)
  rows = is_kept.reshape(6, -1).astype(float)
  assert np.abs(np.corrcoef(rows) - np.eye(6)).max() < 0.02
  of_query = is_kept[0, 0].astype(float)
  assert np.abs(np.corrcoef(of_query) - np.eye(300)).mean() < 0.07
  other = kept(jnp.arange(300), jnp.arange(200), key=jax.random.key(1))
  assert abs(np.mean((other > 0) == is_kept) - (0.7**2 + 0.3**2)) < 0.01


def test_a_stretch_is_that_of_the_whole():
  whole = kept(jnp.arange(40), jnp.arange(50))
  part = kept(jnp.arange(7, 20), jnp.arange(31, 45))
  np.testing.assert_array_equal(part, whole[:, :, 7:20, 31:45])


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_and_flash_drop_alike(is_causal):
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.normal(size=(2, 37, heads, 8)), jnp.float32)
    for heads in (4, 2, 2)
  )
  call = {"is_causal": is_causal, "dropout_rate": 0.4, "dropout_rng": KEY}
  expected = dense_attention(query, key, value, **call)
  for block_size in (None, 5, (7, 16)):
    found = flash_attention(query, key, value, block_size=block_size, **call)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_without_a_key():
  with pytest.raises(ValueError, match=r"^key: expected one to draw"):
    kept(jnp.arange(2), jnp.arange(2), key=None)
