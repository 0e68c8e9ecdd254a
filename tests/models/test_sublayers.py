"""Layers with a second attention, and layers with one sub-layer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import nested
from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig, SecondAttention
from tests.models import tiny
from tests.refusals import assert_refused

BASE = {
  **{"kind": "decoder", "num_layers": 2, "num_heads": 2, "features": 12},
  **{"mlp_features": 10, "position": "none"},
}
SECOND = SecondAttention(
  mechanism=AttentionConfig("retention"),
  around=AroundConfig(num_heads=3, head_dim=4, residual_factors=(1.0, 0.7)),
)


def made(**fields):
  config = nested.make(models.ModelConfig, **BASE | fields)
  model = tiny.of_config(config, target_vocab_size=17, max_target_length=9)
  return model, models.initialize(model, jax.random.key(0), model.example())


def logits(model, variables, ids):
  return np.asarray(models.forward(model, variables, {"inputs": ids}))


IDS = jax.random.randint(jax.random.key(1), (2, 9), 1, 17)


def test_a_second_attention_is_added_with_its_factor():
  """Its outputs are linear in its last kernel, and enter the stream once."""
  model, variables = made(second_attention=SECOND, num_layers=1, mlp_features=0)
  layer = variables["params"]["decoder_0"]
  kernel = layer["second_attention"]["out"]["kernel"]
  assert kernel.shape == (12, 12)
  assert "second_attention_norm" not in layer

  def stream(second, factor):
    """The hidden features before the last norm, of a factor of both kernels."""
    own = layer["self_attention"]["out"]["kernel"]
    changed = {
      name: {**layer[name], "out": {"kernel": new}}
      for name, new in (
        ("second_attention", second * kernel),
        ("self_attention", factor * own),
      )
    }
    params = {**variables["params"], "decoder_0": {**layer, **changed}}
    _, state = model.apply(
      {**variables, "params": params},
      None,
      IDS,
      capture_intermediates=lambda module, _: module.name == "decoder_0",
      mutable=["intermediates"],
    )
    return np.asarray(state["intermediates"]["decoder_0"]["__call__"][0])

  base, both = stream(0.0, 0.0), stream(1.0, 1.0)
  first, second = stream(0.0, 1.0) - base, stream(1.0, 0.0) - base
  np.testing.assert_allclose(base + first + second, both, atol=1e-5)
  without = SecondAttention(
    mechanism=SECOND.mechanism, around=AroundConfig(num_heads=3, head_dim=4)
  )
  model, _ = made(second_attention=without, num_layers=1, mlp_features=0)
  np.testing.assert_allclose(0.7 * (stream(1.0, 0.0) - base), second, atol=1e-5)
  assert np.abs(second).max() > 0.01


def test_a_layer_of_one_sublayer_has_the_norm_and_variables_of_it_alone():
  around = AroundConfig(mlp_features=0), AroundConfig(self_attention=False)
  model, variables = made(decoder_around=around)
  names = [{*variables["params"][f"decoder_{i}"]} for i in range(2)]
  assert names[0] == {"self_attention", "self_attention_norm"}
  assert names[1] == {"mlp", "mlp_norm"}
  steps = logits(model, variables, IDS)
  for length in (1, 5):
    part = logits(model, variables, IDS[:, :length])
    np.testing.assert_allclose(part, steps[:, :length], atol=1e-5)


def test_factors_of_what_is_projected():
  """Those of query and key multiply the logits; that of inputs all of them."""
  one = {"num_layers": 1, "mlp_features": 0}
  plain, variables = made(**one, attention_scale=0.3)
  out = logits(plain, variables, IDS)
  factors = {"input_factor": 4.0, "projection_factors": (2.0, 0.5, 0.25, 1.0)}
  scale = 0.3 / (2.0 * 0.5 * 4.0 * 4.0)
  same, _ = made(**one, attention_scale=scale, **factors)
  np.testing.assert_allclose(logits(same, variables, IDS), out, atol=1e-5)
  factors = {"projection_factors": (2.0, 0.25, 1.0, 1.0)}
  other, _ = made(**one, attention_scale=0.3, **factors)
  assert np.abs(logits(other, variables, IDS) - out).max() > 0.01


SELECTING = {
  "decoder_attention": tuple(
    AttentionConfig("dsa", {**options, "top_k": 3, "index_dim": 8})
    for options in ({}, {"has_indexer": False})
  ),
  "position": "rotary",
}


def test_a_layer_selects_the_keys_of_the_layer_before():
  """Also recomputed in the backward pass, and after a prompt."""
  model, variables = made(**SELECTING)
  assert "attention" not in variables["params"]["decoder_1"]["self_attention"]
  out = logits(model, variables, IDS)

  def outputs(kernel):
    """The result of the second layer's attention, of a kernel of the first's indexer."""
    params = jax.tree.map(lambda x: x, variables["params"])
    params["decoder_0"]["self_attention"]["attention"]["index_key_kernel"] = (
      kernel
    )
    found = {}

    def own(place, record, own, *qkv, **call):
      found[place] = own(*qkv, **call)
      if place == "decoder_0/self_attention":
        return jnp.zeros_like(found[place])
      return found[place]

    changed = {**variables, "params": params}
    models.replace_attention(model, changed, {"inputs": IDS}, own)
    return np.asarray(found["decoder_1/self_attention"])

  index = variables["params"]["decoder_0"]["self_attention"]["attention"]
  kernel = index["index_key_kernel"]
  assert np.abs(outputs(-kernel) - outputs(kernel)).max() > 1e-3
  again, _ = made(**SELECTING, remat="block")
  np.testing.assert_allclose(logits(again, variables, IDS), out, atol=1e-5)

  def loss(model, params):
    batch = {"inputs": IDS}
    return models.forward(model, {**variables, "params": params}, batch).std()

  one, other = (
    jax.grad(loss, argnums=1)(x, variables["params"]) for x in (model, again)
  )
  chex.assert_trees_all_close(one, other, atol=1e-5)
  generated = models.generate(
    model, variables, prompt=IDS[:, :5], max_length=3, bos_id=1, eos_id=0
  )
  ids = IDS[:, :5]
  for t in range(3):
    expected = logits(model, variables, ids)[:, -1].argmax(-1)
    np.testing.assert_array_equal(generated.tokens[:, t], expected)
    ids = jnp.concatenate([ids, expected[:, None]], axis=1)


def test_a_first_layer_has_no_layer_before():
  first = SELECTING["decoder_attention"][1]
  with pytest.raises(
    ValueError,
    match="index_query: expected the gate that dsa attention computes",
  ):
    made(**SELECTING | {"decoder_attention": first})


def test_sublayers_that_do_not_fit():
  second = {"second_attention": SECOND}
  linformer = SecondAttention(mechanism=AttentionConfig("linformer"))
  assert_refused(
    lambda **fields: nested.make(models.ModelConfig, **BASE | fields),
    ("mlp_features", {"self_attention": False, "mlp_features": 0}),
    ("second_attention", {"self_attention": False, **second}),
    ("norm", {"norm": "post", **second}),
    ("position", {"position": "t5", **second}),
    ("parallel", {"parallel": True, **second}),
    ("streams", {"streams": 2, **second}),
    ("second_attention", {"kind": "encoder", **second}),
    ("self_attention", {"kind": "encoder", "self_attention": False}),
    ("second_attention.decoder_attention", {"second_attention": linformer}),
    {"gate_factor": 2.0},
  )


@pytest.mark.parametrize("name", ["mamba", "rg_lru", "compressed"])
def test_values_that_a_mechanism_computes_have_the_width_of_a_head(name):
  fields = {"decoder_attention": AttentionConfig(name), "value_dim": 5}
  with pytest.raises(ValueError, match=r"^value_dim: .* of the 6 features"):
    made(**fields)
