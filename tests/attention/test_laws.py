"""What each mechanism tends to: the laws that tie it to dense attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  dense_attention,
  linformer_attention,
  orthogonal_features,
  performer_attention,
  sliding_window_attention,
)
from attention.testing import Case, assert_close
from tests.attention.forms import thorough

LENGTH = 13
QKV = [jnp.asarray(x) for x in Case(length=LENGTH).draw()[0]]
MASK = jnp.asarray(Case(("mask",), length=LENGTH).draw()[1]["mask"])


@pytest.mark.parametrize(
  ("window", "is_causal"),
  [
    (LENGTH - 1, True),
    ((LENGTH, LENGTH + 50), False),
    *thorough((LENGTH, False), (LENGTH, True)),
  ],
)
def test_a_window_as_long_as_the_input_is_dense(window, is_causal):
  call = {"mask": MASK, "is_causal": is_causal}
  got = sliding_window_attention(*QKV, window=window, **call)
  assert_close(got, dense_attention(*QKV, **call), 1e-6)


def test_a_shorter_window_is_not_dense():
  got = sliding_window_attention(*QKV, window=LENGTH - 2)
  assert np.abs(got - dense_attention(*QKV)).max() > 1e-3


def test_a_window_with_every_token_global_is_dense():
  everyone = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
  got = sliding_window_attention(
    *QKV, window=0, global_indices=everyone, mask=MASK
  )
  assert_close(got, dense_attention(*QKV, mask=MASK), 1e-6)


def test_linformer_with_the_identity_is_dense():
  got = linformer_attention(*QKV, key_projection=jnp.eye(LENGTH))
  assert_close(got, dense_attention(*QKV), 1e-6)
  # A permutation of the keys is as good.
  order = jnp.eye(LENGTH)[::-1]
  got = linformer_attention(*QKV, key_projection=order, value_projection=order)
  assert_close(got, dense_attention(*QKV), 1e-6)


@functools.partial(jax.jit, static_argnames="is_causal")
def performer_errors(projections, is_causal=False):
  """Root mean square error against dense, one for each projection."""
  # Logits near 1, where the law has set in by M = 16.
  query, key, value = (x[:1, :, :1] for x in QKV)
  query, key = query / 2, key / 2
  exact = dense_attention(query, key, value, is_causal=is_causal)

  def error(projection):
    out = performer_attention(
      query, key, value, projection=projection, is_causal=is_causal
    )
    return jnp.sqrt(jnp.mean((out - exact) ** 2))

  return jax.vmap(error)(projections)


def as_1024(projections):
  """Repeats rows: the same estimator, and one shape to compile for all M."""
  return jnp.repeat(projections, 1024 // projections.shape[1], axis=1)


def draw(seed, num_features, draws=48):
  seeds = jax.random.split(jax.random.key(seed), draws)
  return jax.vmap(lambda s: orthogonal_features(s, num_features, 8))(seeds)


@pytest.mark.parametrize("is_causal", [False, *thorough((True,))])
def test_performers_error_falls_with_the_root_of_its_features(is_causal):
  counts = [16, 64, 256, 1024]
  means = [
    performer_errors(as_1024(draw(count, count)), is_causal).mean()
    for count in counts
  ]
  slope = np.polyfit(np.log(counts), np.log(means), 1)[0]
  assert -0.65 <= slope <= -0.35, f"slope {slope:.3f}, errors {means}"


def test_orthogonal_features_are_nearer_than_independent_ones():
  orthogonal = draw(0, 16)
  independent = jax.random.normal(jax.random.key(1), orthogonal.shape)
  assert (
    performer_errors(as_1024(orthogonal)).mean()
    < performer_errors(as_1024(independent)).mean()
  )
