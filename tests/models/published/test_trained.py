"""Models that were trained here become published ones, with equal logits."""

import jax
import numpy as np
import pytest

import models
from models import nested
from models.config import ModelConfig
from tests.models import tiny
from tests.models.published.test_equality import compute

SIZES = {"num_layers": 2, "num_heads": 2, "features": 8, "mlp_features": 12}
TOKENS = np.random.default_rng(0).integers(3, 23, (2, 9))


def trained(**choices):
  """A model and its variables, all of them drawn and none zero."""
  config = nested.make(ModelConfig, **SIZES | choices)
  model = models.create(
    config,
    source_vocab_size=23,
    target_vocab_size=23,
    max_source_length=12,
    max_target_length=12,
    shared_vocabulary=True,
  )
  batch = {"source": TOKENS, "inputs": TOKENS}
  variables = tiny.variables_of(model, batch)
  leaves, tree = jax.tree.flatten(variables)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [
    x + 0.2 * jax.random.normal(key, x.shape)
    for x, key in zip(leaves, keys, strict=True)
  ]
  return model, jax.tree.unflatten(tree, leaves), batch


@pytest.mark.parametrize(
  ("family", "choices"),
  [
    ("gpt_neox", {"position": "rotary", "activation": "gelu_tanh"}),
    pytest.param(
      "gpt_neox",
      {"position": "rotary", "tie_embeddings": False},
      marks=pytest.mark.thorough,
    ),
    ("gpt2", {"position": "learned", "attention_bias": True}),
    ("gpt2", {"position": "sinusoidal", "embedding_scale": 1.0}),
  ],
)
def test_a_decoder_of_any_choices(family, choices, tmp_path):
  model, variables, batch = trained(kind="decoder", **choices)
  wanted = tiny.forward(model, variables, batch)
  p = models.as_pretrained(model, variables)
  assert p.family == family
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert again.family == family
  out = compute(again, {"input_ids": TOKENS})
  np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


def test_an_encoder_like_bert(tmp_path):
  model, variables, batch = trained(
    kind="encoder",
    position="learned",
    norm="post",
    norm_epsilon=1e-12,
    activation="gelu",
    attention_bias=True,
    embedding_norm=True,
    embedding_scale=1.0,
    token_types=2,
    head_transform=True,
    head_bias=True,
  )
  p = models.as_pretrained(model, variables)
  assert p.architecture == "BertForMaskedLM"
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  out = compute(again, {"input_ids": TOKENS})
  wanted = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


def test_mechanisms_stay(tmp_path):
  chosen = models.AttentionConfig("performer", {"num_features": 16})
  model, variables, batch = trained(
    kind="decoder", position="rotary", decoder_attention=chosen
  )
  models.save_pretrained(tmp_path, models.as_pretrained(model, variables))
  again = models.load_pretrained(tmp_path)
  assert models.slots(again.model.config) == "performer"
  out = compute(again, {"input_ids": TOKENS})
  wanted = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


def test_what_no_family_is():
  model, variables, _ = trained(kind="decoder", position="alibi")
  with pytest.raises(ValueError, match=r"gpt2 has other position \(learned\)"):
    models.as_pretrained(model, variables)
