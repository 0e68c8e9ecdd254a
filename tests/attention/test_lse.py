"""`return_lse` of mechanisms that gather or project their keys, with gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  bigbird_attention,
  linformer_attention,
  strided_2d_attention,
  window_2d_attention,
)

LENGTH = 20
CALLS = {
  "bigbird": partial(
    bigbird_attention,
    block_size=4,
    random_blocks=jnp.full((4, 3, 1), 3, jnp.int32),
  ),
  "window_2d": partial(window_2d_attention, grid=(4, 5), window=2, shift=1),
  "strided_2d": partial(strided_2d_attention, grid=(4, 5), stride=2),
}


def draw():
  """Query, key, value, and a mask that hides all keys of the second example."""
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, LENGTH, n, 8)), jnp.float32)
    for n in (4, 2, 2)
  )
  mask = jnp.asarray(rng.random((2, LENGTH)) < 0.7).at[1].set(False)
  return query, key, value, mask[:, None, None]


def lse_of(query, key, shown):
  logits = jnp.einsum("btnh,bsnh->btns", query, jnp.repeat(key, 2, 2)) / 8**0.5
  return jax.nn.logsumexp(jnp.where(shown, logits, -jnp.inf), axis=-1)


def check(call, expected, query, key, value, mask):
  """Values of (out, lse), zeros and −∞ where nothing is seen, and gradients."""
  with_lse = jax.jit(partial(call, mask=mask, return_lse=True))
  out, lse = with_lse(query, key, value)
  alone = jax.jit(partial(call, mask=mask))(query, key, value)
  np.testing.assert_allclose(out, alone, atol=1e-6)
  assert lse.dtype == jnp.float32
  assert not np.any(out[1])
  assert (np.asarray(lse[1]) == -np.inf).all()
  np.testing.assert_allclose(lse[0], expected(query, key)[0], rtol=1e-5)

  def total(lse):
    return jnp.sum(jnp.sin(jnp.where(lse == -jnp.inf, 0.0, lse)))

  got, want = (
    jax.jit(jax.grad(lambda q, k, f=f: total(f(q, k)), (0, 1)))(query, key)
    for f in (lambda q, k: with_lse(q, k, value)[1], expected)
  )
  for x, y in zip(got, want, strict=True):
    assert not np.any(x[1])
    np.testing.assert_allclose(x[0], y[0], atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_lse_is_that_of_the_keys_seen(name):
  query, key, value, mask = draw()
  call = CALLS[name]
  weights = jax.jit(partial(attention_weights, call))(query, key, mask=mask)
  shown = jnp.moveaxis(weights > 0, 1, 2)
  check(call, lambda q, k: lse_of(q, k, shown), query, key, value, mask)


def test_lse_of_linformer_is_that_of_its_rows():
  query, key, value, mask = draw()
  projection = jax.random.normal(jax.random.key(1), (LENGTH, 6))
  call = partial(linformer_attention, key_projection=projection)

  def expected(query, key):
    key = jnp.where(mask[:, 0, 0, :, None, None], key, 0)
    return lse_of(query, jnp.einsum("sr,bskh->brkh", projection, key), True)

  check(call, expected, query, key, value, mask)


def test_forward_mode_and_second_derivatives():
  query, key, value, mask = draw()
  call = partial(CALLS["window_2d"], mask=mask)

  def loss(query):
    return jnp.sum(call(query, key, value) ** 2)

  @jax.jit
  def derivatives(query, along):
    gradient = jax.grad(loss)
    return (
      jax.jvp(loss, (query,), (along,))[1],
      jnp.vdot(gradient(query), along),
      jax.jvp(gradient, (query,), (along,))[1],
      jax.vjp(gradient, query)[1](along)[0],
    )

  slope, expected, forward, backward = derivatives(query, key.repeat(2, 2))
  np.testing.assert_allclose(slope, expected, rtol=1e-4)
  np.testing.assert_allclose(forward, backward, atol=1e-4)
