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
  rng = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda x: (x + 0.2 * rng.standard_normal(x.shape)).astype(x.dtype),
    variables,
  )
  return model, variables, batch


def published(model, variables, batch, folder):
  """The model as a folder gives it back, with the logits that it had."""
  models.save_pretrained(folder, models.as_pretrained(model, variables))
  again = models.load_pretrained(folder)
  out = compute(again, {"input_ids": TOKENS})
  wanted = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)
  return again


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
  again = published(*trained(kind="decoder", **choices), tmp_path)
  assert again.family == family


def test_an_encoder_like_bert(tmp_path):
  made = trained(
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
  assert published(*made, tmp_path).architecture == "BertForMaskedLM"


def test_mechanisms_stay(tmp_path):
  chosen = models.AttentionConfig("linear", {"feature_map": "hedgehog"})
  made = trained(
    kind="decoder", position="rotary", decoder_attention=chosen, num_layers=1
  )
  assert models.slots(published(*made, tmp_path).model.config) == "linear"


def test_what_no_family_is():
  model, variables, _ = trained(kind="decoder", position="alibi")
  with pytest.raises(ValueError, match=r"gpt2 differs in position \(learned\)"):
    models.as_pretrained(model, variables)
