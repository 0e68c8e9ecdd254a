"""A model is the same on every platform, and computed where its arrays lie."""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from attention import Dims, dense, flash
from attention.platform import backend
import models
from models.config import ModelConfig
from models.mlp import Mlp
from models.multi_head_attention import MultiHeadAttention
from tests.models import tiny

BATCH, LENGTH, FEATURES = 4, 8, 16


def attention_module(mechanism):
  dims = Dims(
    num_heads=4, num_kv_heads=2, head_dim=8, max_length=LENGTH, features=32
  )
  return MultiHeadAttention(mechanism, dims, features=FEATURES)


def mlp():
  config = ModelConfig(
    kind="encoder",
    num_layers=1,
    num_heads=2,
    features=FEATURES,
    mlp_features=32,
  )
  return Mlp(config, out_scale=1.0)


def initialized(module):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((BATCH, LENGTH, FEATURES), np.float32)
  # A new function each time, so that it is traced for the platform of then.
  init = jax.jit(lambda key, x: module.init(key, x))
  return init(jax.random.key(1), x), x


def with_gradients(module):
  """A new function each time, as above."""

  def call(variables, x):
    out, pull = jax.vjp(module.apply, variables, x)
    return out, pull(jnp.cos(out))

  return jax.jit(call)


def test_attention_is_the_same_on_a_gpu():
  module = attention_module(dense())
  variables, x = initialized(module)
  with backend.tracing_for("gpu"):
    others, _ = initialized(module)
    got = with_gradients(module)(variables, x)
  chex.assert_trees_all_equal(variables, others)
  expected = with_gradients(module)(variables, x)
  chex.assert_trees_all_close(got, expected, atol=1e-5)


def test_a_model_is_the_same_on_a_gpu():
  model = tiny.create("decoder", decoder_attention=tiny.attention("dense"))
  variables, batch = tiny.initialized(model), tiny.batch()
  results = []
  for name in ("cpu", "gpu"):
    with backend.tracing_for(name):
      # Not `tiny.forward`, which is traced once for all platforms.
      forward = jax.jit(lambda x: models.forward(model, x, batch))
      results.append(forward(variables))
  np.testing.assert_allclose(*results, atol=1e-5)


def collectives(function, *arrays):
  text = function.lower(*arrays).compile().as_text()
  names = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
  return {name for name in names if f" {name}" in text}


def on_four_devices(tree, axes, spec_of):
  """`tree` on a 2 × 2 mesh, each leaf as `spec_of` says of its path."""
  mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), axes)
  return jax.tree.map_with_path(
    lambda path, x: jax.device_put(
      x,
      NamedSharding(mesh, PartitionSpec(*spec_of(jax.tree_util.keystr(path)))),
    ),
    tree,
  )


def spec_by_heads(path):
  """Heads along 'tensor': columns of three kernels, rows of the last."""
  return ("tensor", None) if "out" in path else (None, "tensor")


@pytest.mark.parametrize("mechanism", [dense, flash])
def test_heads_and_batch_are_computed_where_they_are(mechanism):
  module = attention_module(mechanism())
  variables, x = initialized(module)
  axes = ("data", "tensor")
  variables = on_four_devices(variables, axes, spec_by_heads)
  x = on_four_devices(x, axes, lambda _: ("data",))
  with backend.tracing_for("gpu"):
    found = collectives(with_gradients(module), variables, x)
  # Sums over heads and examples are all that is sent.
  assert found == {"all-reduce"}


def test_positions_are_computed_where_they_are():
  module = mlp()
  variables, x = initialized(module)
  axes = ("data", "sequence")
  variables = on_four_devices(variables, axes, lambda _: ())
  x = on_four_devices(x, axes, lambda _: axes)
  forward = collectives(jax.jit(module.apply), variables, x)
  both = collectives(with_gradients(module), variables, x)
  assert not forward
  assert both == {"all-reduce"}
