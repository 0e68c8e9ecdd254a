"""A norm, a position encoding or an activation of one's own is a function."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, nested
from settings.build import build, to_mapping
from tests.models import tiny
from tests.refusals import assert_refused

HERE = "tests.models.test_named"


def ramp(positions, features):
  """As a position encoding: every feature grows at a rate of its own."""
  return 0.1 * jnp.einsum("bt,f->btf", positions, jnp.arange(features))


def nothing(positions, features):
  return jnp.zeros((*positions.shape, features))


class Centred(nn.Module):
  """As a norm: x less its mean, times a trained number."""

  epsilon: float
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(self, x):
    gain = self.param("gain", nn.initializers.ones, (), self.param_dtype)
    return gain * (x - x.mean(-1, keepdims=True))


def logits(**choices):
  model = tiny.create("decoder", **choices)
  variables = tiny.initialize(model, jax.random.key(0), tiny.batch())
  return tiny.forward(model, variables, tiny.batch()), variables["params"]


def test_a_position_encoding_is_added():
  without, _ = logits(position="none")
  as_none, _ = logits(position=f"{HERE}:nothing")
  np.testing.assert_array_equal(without, as_none)
  ramped, _ = logits(position=f"{HERE}:ramp")
  # The first position has 0 added, and sees no other.
  np.testing.assert_array_equal(without[:, 0], ramped[:, 0])
  assert np.abs(without[:, 1:] - ramped[:, 1:]).max() > 1e-3


def test_a_norm_has_its_own_variables_and_a_run_keeps_its_path():
  model = tiny.create("decoder", norm_kind=f"{HERE}:Centred")
  params = jax.eval_shape(
    lambda key: tiny.initialize(model, key, tiny.batch()), jax.random.key(0)
  )["params"]
  assert set(params["decoder_norm"]) == {"gain"}
  assert set(params["decoder_0"]["mlp_norm"]) == {"gain"}
  assert build(ModelConfig, to_mapping(model.config)) == model.config


def test_an_activation_is_any_function():
  ours, _ = logits(activation="silu")
  theirs, _ = logits(activation="jax.nn:silu")
  np.testing.assert_array_equal(ours, theirs)


def test_what_is_not_there_is_told():
  fields = ("activation", "position", "norm_kind")
  assert_refused(
    tiny.create,
    *({"norm_kind": f"{HERE}:Norm"}, {"position": "nowhere:ramp"}),
    {"activation": "sillu"},
    # What is there, and is none.
    *({field: "os:getcwd"} for field in fields),
    *({field: "jax:default_backend"} for field in fields),
  )


def test_leaves_of_nested_configs_need_no_section():
  config = tiny.create("decoder", attention_bias=True, head_bias=True).config
  assert config.slot.attention_bias
  assert config.output.head_bias
  mapping = to_mapping(config)
  flat = {**mapping.pop("slot"), **mapping.pop("output"), **mapping}
  assert build(ModelConfig, nested.nest(ModelConfig, flat)) == config
  changed = nested.replace(config, value_dim=3, num_layers=2)
  assert (changed.slot.value_dim, changed.num_layers) == (3, 2)
  assert changed.slot.attention_bias
  with pytest.raises(ValueError, match=r"^value_dim: .*slot.value_dim"):
    nested.nest(ModelConfig, {"value_dim": 3, "slot": {"value_dim": 4}})
