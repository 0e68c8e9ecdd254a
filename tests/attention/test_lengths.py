"""Numbers of queries and keys that count are those of `jax.nn`; arrays of one example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  as_attention_fn,
  causal,
  dense_attention,
  flash_attention,
  lengths,
  sliding_window_attention,
  window,
)
from attention.testing import assert_close
from tests.attention.calls import draw, pulled

QUERIES, KEYS = np.array([13, 4, 0], np.int32), np.array([11, 13, 5], np.int32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_are_those_of_jax(is_causal):
  """Results and gradients, by `visible=` and beside the options."""
  arrays = draw(13, batch=3)
  expected = pulled(
    lambda *qkv: jax.nn.dot_product_attention(
      *qkv,
      is_causal=is_causal,
      query_seq_lengths=jnp.asarray(QUERIES),
      key_value_seq_lengths=jnp.asarray(KEYS),
    ),
    *arrays,
  )
  both = lengths(QUERIES, KEYS)
  by_visible = lengths(QUERIES) & lengths(None, KEYS)
  by_visible = by_visible & causal() if is_causal else by_visible
  for found in (
    pulled(
      lambda *qkv: dense_attention(*qkv, is_causal=is_causal, visible=both),
      *arrays,
    ),
    pulled(lambda *qkv: flash_attention(*qkv, visible=by_visible), *arrays),
  ):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
      assert_close(x, y, 1e-6)


def test_windows_take_lengths():
  """Where a query sees a key: without one, `jax.nn` gives a mean of all values."""
  arrays = draw(13, batch=3)
  expected = jax.nn.dot_product_attention(
    *arrays,
    query_seq_lengths=jnp.asarray(QUERIES),
    key_value_seq_lengths=jnp.asarray(KEYS),
    local_window_size=(2, 1),
  )
  t = np.arange(13)
  sees = (t < QUERIES[:, None]) & (t - 2 < KEYS[:, None])
  for found in (
    sliding_window_attention(
      *arrays, window=(2, 1), visible=lengths(QUERIES, KEYS)
    ),
    flash_attention(*arrays, visible=window(2, 1) & lengths(QUERIES, KEYS)),
  ):
    found = np.asarray(found)
    assert_close(found[sees], np.asarray(expected)[sees], 1e-6)
    assert not found[~sees].any()


def test_padding_may_hold_anything():
  query, key, value = draw(13, batch=3)
  expected = flash_attention(query, key, value, visible=lengths(None, KEYS))
  hidden = (np.arange(13) >= KEYS[:, None])[..., None, None]
  key, value = (jnp.where(hidden, jnp.nan, x) for x in (key, value))
  found = flash_attention(query, key, value, visible=lengths(None, KEYS))
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ((np.ones(3), None), r"query_lengths: expected integers \[B\] or None"),
    ((None, np.ones((3, 1), int)), r"key_lengths: expected integers \[B\] or"),
    ((None, np.ones(2, int)), r"key_lengths: expected \[B\] = \(3,\), got"),
  ],
)
def test_what_does_not_fit_is_told(given, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    flash_attention(*draw(13, batch=3), visible=lengths(*given))


def test_arrays_of_one_example():
  """A function says what takes them, and that gives what `jax.nn` gives."""
  query, key, value = (x[0] for x in draw(13))
  with pytest.raises(
    ValueError, match=r"^query: expected 4 .* as_attention_fn"
  ):
    dense_attention(query, key, value)
  attend = as_attention_fn(flash_attention)
  expected = jax.nn.dot_product_attention(query, key, value)
  assert_close(attend(query, key, value), expected, 1e-6)
  many = (jnp.stack([x, 2 * x]) for x in (query, key, value))
  assert_close(jax.vmap(attend)(*many)[0], expected, 1e-6)
