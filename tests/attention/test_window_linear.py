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
from attention.testing import assert_close
import models
from tests.attention.calls import assert_defined, normal, pulled
from tests.models import tiny
from tests.refusals import assert_refused

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


fast = functools.partial(window_linear_attention, is_causal=True)
define = functools.partial(definitions.window_linear_attention, is_causal=True)


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
    qkv[1] = qkv[1][:, :1]
  options = {"window": window, "scale": 0.7, "mask": mask}

  def run(function):
    def of_tree(tree):
      (query, key, value), trained = tree
      key = key.repeat(source // key.shape[1], axis=1)
      return function(query, key, value, **trained, **options)

    return of_tree

  # Of keys that are alike, gradients cancel.
  assert_defined(run(fast), run(define), (qkv, trained), of_largest=1e-5)


def test_huge_logits():
  """Logits near 10⁴, features that vanish, windows that are empty."""
  qkv, trained, mask = draw(61, hidden=0.7, size=100.0)
  run = functools.partial(fast, mask=mask, window=4)
  out, gradients = pulled(lambda qkv, x: run(*qkv, **x), qkv, trained)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  defined = define(*qkv, **trained, window=4, mask=mask)
  # Products of features that float32 rounds to nothing count as no key.
  is_lost = ~out.any(axis=-1) & defined.any(axis=-1)
  assert is_lost.mean() < 0.05
  assert_close(out[~is_lost], defined[~is_lost], 1e-3)


def test_kernels_start_as_the_identity_and_the_share_at_a_tenth():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=6, max_length=100)
  params = window_linear().init(jax.random.key(0), dims)["params"]
  for name, heads in (("query_kernel", 4), ("key_kernel", 2)):
    np.testing.assert_array_equal(params[name], np.stack([np.eye(6)] * heads))
  np.testing.assert_allclose(1 / (1 + np.exp(-params["mix"])), [0.1] * 4, 1e-6)


def test_wrong_arguments_are_refused(unchecked):
  qkv, trained, _ = draw(9)
  square = np.zeros((3, HEAD_DIM, HEAD_DIM), np.float32)
  given = {**trained, "window": 3, "is_causal": True}
  assert_refused(
    lambda **change: window_linear_attention(*qkv, **given | change),
    {"query_kernel": square},
    {"key_kernel": square},
    {"mix": np.zeros(3, np.float32)},
    *({"window": x} for x in (0, -1, 2.0, (2, 0), True)),
    {"is_causal": False},
  )
  with pytest.raises(ValueError, match=r"^window: 20 covers all 20"):
    window_linear(20).init(jax.random.key(0), Dims(4, 2, 6, 20))
  apply = functools.partial(window_linear(3).apply, {"params": trained}, *qkv)
  assert_refused(apply, {"window": 4, "is_causal": True})


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
