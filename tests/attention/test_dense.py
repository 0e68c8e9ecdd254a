"""What only dense attention has: bias as mask, dropout, jax.nn's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attention_weights, dense_attention
from tests.attention.cases import Case, assert_close


def qkv(**shape):
  return [jnp.asarray(x) for x in Case(**shape).draw()[0]]


def test_equals_jax_nn():
  query, key, value = qkv()
  bias = jnp.asarray(Case(("bias",)).draw()[1]["bias"])
  mask = jnp.tri(13, k=3, dtype=bool)[None, None]
  expected = jax.nn.dot_product_attention(
    query, key, value, bias=bias, mask=mask, is_causal=True, scale=0.3
  )
  got = dense_attention(
    query, key, value, bias=bias, mask=mask, is_causal=True, scale=0.3
  )
  assert_close(got, expected, 1e-6)


def test_a_bias_of_minus_infinity_is_a_mask():
  query, key, value = qkv()
  mask = (
    jnp.asarray(Case(("full_mask",)).draw()[1]["mask"]).at[0, 0, 2].set(False)
  )
  bias = jnp.where(mask, 0.0, -jnp.inf)

  def loss(query, **options):
    out = dense_attention(query, key, value, **options)
    return (out**2).sum(), out

  (_, got), gradient = jax.value_and_grad(loss, has_aux=True)(query, bias=bias)
  (_, expected), _ = jax.value_and_grad(loss, has_aux=True)(query, mask=mask)
  assert not got[0, 2, 0].any()
  assert_close(got, expected, 1e-6)
  assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_nan_is_not_hidden(is_causal):
  """Training stops at what is not finite, so it has to come through."""
  for i in range(3):
    arrays = qkv()
    arrays[i] = arrays[i].at[1, 5].set(jnp.nan)
    out = dense_attention(*arrays, is_causal=is_causal)
    assert jnp.isnan(out[1, 5]).all()
    assert jnp.isfinite(out[0]).all()


def test_dropout_drops_a_share_of_the_weights_and_rescales_the_others():
  query, key, _ = qkv(batch=8)
  weights = attention_weights(dense_attention, query, key)
  dropped = attention_weights(
    dense_attention,
    query,
    key,
    dropout_rate=0.25,
    dropout_rng=jax.random.key(0),
  )
  kept = dropped != 0
  # 8·4·13·13 weights: four standard deviations are 0.024.
  assert abs(kept.mean() - 0.75) < 0.024
  assert_close(dropped[kept], weights[kept] / 0.75, 1e-6)
  # Each example, head and query draws its own.
  rows = np.asarray(kept).reshape(-1, 13)
  assert len(np.unique(rows, axis=0)) > 300


def test_dropout_is_a_function_of_its_key():
  arrays = qkv()
  drop = functools.partial(dense_attention, *arrays, dropout_rate=0.5)
  first, again, other = (
    drop(dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1)
  )
  assert (first == again).all()
  assert (first != other).any()
  mean = jax.vmap(lambda key: drop(dropout_rng=key))(
    jax.random.split(jax.random.key(2), 1024)
  ).mean(axis=0)
  assert_close(mean, dense_attention(*arrays), 0.1)


def test_dropout_needs_a_key_and_a_rate():
  arrays = qkv()
  assert (
    dense_attention(*arrays, dropout_rng=jax.random.key(0))
    == dense_attention(*arrays)
  ).all()
  with pytest.raises(ValueError, match=r"^dropout_rng: expected a key"):
    dense_attention(*arrays, dropout_rate=0.1)
  for rate in (-0.1, 1.0, float("nan")):
    with pytest.raises(ValueError, match=r"^dropout_rate: expected \[0, 1\)"):
      dense_attention(*arrays, dropout_rate=rate)


def test_a_wrong_bias_raises():
  with pytest.raises(ValueError, match=r"^bias: .*\[2, 4, 13, 13\]"):
    dense_attention(*qkv(), bias=jnp.zeros((2, 3, 13, 13)))
