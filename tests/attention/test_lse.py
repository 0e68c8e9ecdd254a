"""`return_lse` of mechanisms that gather or project their keys, with gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  bigbird_attention,
  definitions,
  linformer_attention,
  strided_2d_attention,
  window_2d_attention,
)
from tests.attention.calls import (
  assert_defined,
  counted,
  draw,
  normal,
  random_mask,
)

LENGTH = 20
CALLS = {
  "bigbird": (
    bigbird_attention,
    {"block_size": 4, "random_blocks": jnp.full((4, 3, 1), 3, jnp.int32)},
  ),
  "window_2d": (window_2d_attention, {"grid": (4, 5), "window": 2, "shift": 1}),
  "strided_2d": (strided_2d_attention, {"grid": (4, 5), "stride": 2}),
}


def key_mask(length=LENGTH):
  """A mask that hides all keys of the second example."""
  mask = np.array(random_mask(2, 1, 1, length))
  mask[1] = False
  return jnp.asarray(mask)


def weights_of(function, query, key, **options):
  """The effective matrix `[B, T, N, S]` of a definition."""
  length, heads = key.shape[1:3]
  identity = np.broadcast_to(np.eye(length)[:, None], (length, heads, length))
  identity = np.broadcast_to(identity, (len(key), *identity.shape))
  return function(query, key, identity, **options)


def of_pairs(query, key, value, shown):
  """Result and log-sum-exp by all pairs; `shown` is `[B, T, N, S]`."""
  key, value = (np.repeat(x, 2, axis=2) for x in (key, value))
  logits = np.einsum("btnh,bsnh->btns", query, key) / query.shape[-1] ** 0.5
  logits = np.where(shown, logits, -np.inf)
  lse = np.logaddexp.reduce(logits, axis=-1)
  largest = np.where(lse == -np.inf, 0.0, lse)[..., None]
  return np.einsum("btns,bsnv->btnv", np.exp(logits - largest), value), lse


def check(call, expected, *qkv):
  """Values and gradients of both; zeros and −∞ where nothing is seen."""
  assert_defined(
    lambda qkv: counted(*call(*qkv, return_lse=True)),
    lambda qkv: counted(*expected(*qkv)),
    qkv,
  )


@pytest.mark.parametrize("name", CALLS)
def test_lse_is_that_of_the_keys_seen(name):
  function, options = CALLS[name]
  qkv, options = draw(LENGTH), {**options, "mask": key_mask()}
  definition = getattr(definitions, function.__name__)
  shown = weights_of(definition, *qkv[:2], **options) > 0
  check(partial(function, **options), partial(of_pairs, shown=shown), *qkv)


def test_lse_of_linformer_is_that_of_its_rows():
  mask, (projection,) = key_mask(), normal((LENGTH, 6), seed=1)
  call = partial(linformer_attention, key_projection=projection, mask=mask)
  keep = mask[:, 0, 0, :, None, None]

  def expected(query, *kv):
    kv = (np.where(keep, x, 0.0) for x in kv)
    rows = (np.einsum("sr,bskh->brkh", projection, x) for x in kv)
    # The second example has none.
    return of_pairs(query, *rows, np.array([True, False]).reshape(2, 1, 1, 1))

  check(call, expected, *draw(LENGTH))


def test_forward_mode_and_second_derivatives():
  query, key, value = draw(LENGTH)
  function, options = CALLS["window_2d"]
  call = partial(function, **options, mask=key_mask())

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

  along = np.repeat(key, 2, axis=2)
  slope, expected, forward, backward = derivatives(query, along)
  np.testing.assert_allclose(slope, expected, rtol=1e-4)
  np.testing.assert_allclose(forward, backward, atol=1e-4)
