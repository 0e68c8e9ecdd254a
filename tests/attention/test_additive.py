"""Additive attention beyond the contract: blocks, dropout, kernels, its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import additive, additive_attention, definitions
from attention.platform import backend
from attention.testing import Case, assert_close
from tests.attention.calls import assert_defined, assert_dropout, normal
from tests.refusals import assert_refused

WIDTH = 6


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 4 queries and 5 keys, so that short sequences run over many."""
  monkeypatch.setattr(backend, "block", lambda *_: (4, 5))


@functools.cache
def kernels(dims, width=WIDTH):
  init = jax.jit(lambda key: additive(width).init(key, dims))
  return init(jax.random.key(0))["params"]


def draw(case):
  """Query, key, value, parameters and the call."""
  arrays, call = case.draw()
  call = {k: x if x is True else jnp.asarray(x) for k, x in call.items()}
  return [jnp.asarray(x) for x in arrays], kernels(case.dims), call


@pytest.mark.parametrize(
  ("case", "bias_shape", "mask_axes"),
  [
    (Case(("causal", "mask", "segments"), length=14), (1, 1, 1, 1), ()),
    (
      Case(("full_mask", "causal"), length=11, source_length=18, value_dim=3),
      *((2, 4, 11, 18), ()),
    ),
    (Case(("full_mask",), length=2, source_length=11), (2, 1, 2, 1), (0, 2)),
  ],
)
@pytest.mark.usefixtures("short_blocks")
def test_blocks_are_the_definition(case, bias_shape, mask_axes):
  """With gradients of a bias and with masks of every shape that broadcasts."""
  qkv, params, call = draw(case)
  (bias,) = normal(bias_shape, seed=3)
  for axis in mask_axes:
    call["mask"] = call["mask"].take(jnp.array([0]), axis=axis)

  def run(function):
    def of_tree(arrays):
      qkv, params, bias = arrays
      return function(*qkv, **params, bias=bias, **call)

    return of_tree

  functions = additive_attention, definitions.additive_attention
  # A bias that is one number has no gradient.
  assert_defined(*map(run, functions), (qkv, params, bias), of_largest=1e-6)


def test_dropout_drops_weights():
  """Neither heads, rows nor blocks share their draws."""
  qkv, params, call = draw(Case(("bias",), length=150, batch=1))
  attend = functools.partial(additive_attention, **params, **call)
  kept = assert_dropout(attend, *qkv)
  blocks = kept[:, :, :144, :128].reshape(4, 9, 16, 2, 64)
  blocks = blocks.transpose(0, 1, 3, 2, 4).reshape(72, -1)
  assert len({block.tobytes() for block in blocks}) == 72


def test_the_scale_is_one_unless_given():
  qkv, params, _ = draw(Case())
  attend = jax.jit(functools.partial(additive_attention, **params))
  np.testing.assert_array_equal(attend(*qkv), attend(*qkv, scale=1.0))
  # A traced factor that makes every key weigh the same.
  flat = attend(*qkv, scale=jnp.float32(0.0))
  mean = np.repeat(np.mean(qkv[2], axis=1, keepdims=True), 2, axis=2)
  assert_close(flat, np.broadcast_to(mean, flat.shape), 1e-6)


def test_what_does_not_fit_is_refused(unchecked):
  qkv, params, _ = draw(Case())
  assert_refused(
    lambda **change: additive_attention(*qkv, **params | change),
    {"query_kernel": params["query_kernel"][:2]},
    {"key_kernel": params["key_kernel"][..., :3]},
    {"key_kernel": params["key_kernel"][:, :3]},
    {"score_kernel": params["score_kernel"][:, :3]},
  )
  assert_refused(additive, {"width": 0})


def test_the_factory_draws_kernels():
  params = kernels(Case(head_dim=16, num_heads=64).dims, width=32)
  for name, shape, fan_in in (
    ("query_kernel", (64, 16, 32), 16),
    ("key_kernel", (64, 16, 32), 16),
    ("score_kernel", (64, 32), 32),
  ):
    assert params[name].shape == shape
    deviation = np.std(params[name]) * fan_in**0.5
    assert deviation == pytest.approx(1, abs=0.05)
