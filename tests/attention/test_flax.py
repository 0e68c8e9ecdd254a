"""Flax modules that hold and train the variables of a mechanism."""

from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention import as_attention_fn, dense, linear, linformer, performer
from attention.flax import LinenAttention, NNXAttention
from attention.testing import assert_close
from tests.attention.test_attention_fn import (
  DIMS,
  HEADS,
  INPUTS,
  KEY_MASK,
  MASK,
  nnx_module,
  run_nnx,
)

MECHANISMS = {
  "linformer": linformer(rank=3),  # Has params.
  "performer": performer(num_features=8),  # Has constants.
  "dense": dense(),  # Has neither.
}
MASKS = dict.fromkeys(MECHANISMS, KEY_MASK) | {"dense": MASK}


def linen_module(attention_fn):
  """Compiled `(init, apply)` of a module."""
  module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
  return jax.jit(module.init_with_output), jax.jit(module.apply)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_linen_module_computes_what_the_function_does(name):
  """Mask included: Linen passes only what a signature names."""
  record, mask = MECHANISMS[name], MASKS[name]
  init, apply = linen_module(LinenAttention(record, DIMS))
  out, variables = init(jax.random.key(3), INPUTS)
  made = jax.eval_shape(lambda key: record.init(key, DIMS), jax.random.key(0))
  own = {kind: variables[kind]["attention_fn"] for kind in made}
  assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, made)
  got = apply(variables, INPUTS, mask=mask)
  params = {k: v for k, v in variables["params"].items() if k != "attention_fn"}
  _, plain = linen_module(as_attention_fn(record, own))
  expected = plain({"params": params}, INPUTS, mask=mask)
  np.testing.assert_allclose(got, expected, atol=1e-6)
  assert np.abs(got - out).max() > 1e-3


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_nnx_module_computes_what_the_function_does(name):
  record, mask = MECHANISMS[name], MASKS[name]
  module = nnx_module(NNXAttention(record, DIMS, rngs=nnx.Rngs(3)))
  made = record.init(nnx.Rngs(3).params(), DIMS)
  expected = nnx_module(as_attention_fn(record, made))(INPUTS, mask=mask)
  np.testing.assert_array_equal(module(INPUTS, mask=mask), expected)
  assert np.abs(expected - module(INPUTS)).max() > 1e-3


def test_options_hold_in_every_call_of_the_modules():
  fn = as_attention_fn(linear(), is_causal=True)
  init, _ = linen_module(LinenAttention(linear(), DIMS, {"is_causal": True}))
  got, variables = init(jax.random.key(2), INPUTS)
  _, apply = linen_module(fn)
  assert_close(got, apply(variables, INPUTS), 1e-6)
  own = NNXAttention(linear(), DIMS, rngs=nnx.Rngs(3), is_causal=True)
  assert_close(run_nnx(own), run_nnx(fn), 1e-6)


def test_a_step_of_linen_trains_the_projections_of_a_mechanism():
  init, apply = linen_module(LinenAttention(MECHANISMS["linformer"], DIMS))
  params = init(jax.random.key(3), INPUTS)[1]["params"]

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    return jnp.mean(jnp.square(apply({"params": params}, INPUTS) - 1.0))

  first, gradient = loss(params)
  step = jax.tree.map(lambda p, g: p - np.float32(0.01) * g, params, gradient)
  projections = gradient["attention_fn"]
  assert set(projections) == {"key_projection", "value_projection"}
  for name, grad in projections.items():
    assert np.abs(grad).max() > 1e-4
    moved = step["attention_fn"][name] - params["attention_fn"][name]
    assert np.abs(moved).max() > 0.0
  assert loss(step)[0] < first


def test_a_step_of_nnx_trains_the_projections_of_a_mechanism():
  own = NNXAttention(MECHANISMS["linformer"], DIMS, rngs=nnx.Rngs(3))
  module = nnx_module(own)
  optimizer = nnx.Optimizer(module, optax.sgd(0.01), wrt=nnx.Param)

  @nnx.jit
  def step(module, optimizer):
    def loss(module):
      return jnp.mean(jnp.square(module(INPUTS) - 1.0))

    value, gradient = nnx.value_and_grad(loss)(module)
    optimizer.update(module, gradient)
    return value

  before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(own, nnx.Param)))
  first, second = step(module, optimizer), step(module, optimizer)
  assert second < first
  after = nnx.to_pure_dict(nnx.state(own, nnx.Param))
  moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, after)
  assert set(moved["params"]) == {"key_projection", "value_projection"}
  assert min(moved["params"].values()) > 1e-6


@pytest.mark.parametrize("name", ["performer", "dense"])
def test_what_a_mechanism_draws_is_not_trained(name):
  init, _ = linen_module(LinenAttention(MECHANISMS[name], DIMS))
  _, variables = jax.eval_shape(init, jax.random.key(3), INPUTS)
  assert "attention_fn" not in variables["params"]
  own = NNXAttention(MECHANISMS[name], DIMS, rngs=nnx.Rngs(3))
  assert not jax.tree.leaves(nnx.state(own, nnx.Param))
