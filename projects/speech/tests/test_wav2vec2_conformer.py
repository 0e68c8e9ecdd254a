"""Published Conformers: what is in their folders beside a Transformer's."""

import numpy as np
import pytest

import models
from projects.speech import features as speech_features
from projects.speech.config import ExtractorConfig
from projects.speech.family import describe
from tests.models.published.test_equality import (
  assert_not_read,
  changed,
  compute,
  expected,
  loaded,
  same,
)

RELATIVE, ROTARY = "wav2vec2_conformer_relative", "wav2vec2_conformer_rotary"
CONVOLUTION = "wav2vec2_conformer.encoder.pos_conv_embed.conv"
NORM = "wav2vec2_conformer.encoder.layers.1.conv_module.batch_norm"


def test_padding_does_not_matter():
  """With norms of each frame, what padding holds changes no logit."""
  p = loaded(RELATIVE)
  inputs, _ = expected(RELATIVE)
  noise = np.random.default_rng(0).standard_normal(
    inputs["input_values"].shape, np.float32
  )
  is_padding = inputs["attention_mask"] == 0
  other = np.where(is_padding, 1e3 * noise, inputs["input_values"])
  extractor = p.model.config.extractor
  out = compute(p, inputs)
  kept = speech_features.position_mask(
    extractor, inputs["attention_mask"] != 0, out.shape[1]
  )
  assert kept.sum(1).tolist() == [30, 19, 2]
  np.testing.assert_array_equal(
    out, compute(p, inputs | {"input_values": other})
  )


def test_weight_norm_by_its_old_names(tmp_path):
  """`weight_g` and `weight_v`, as PyTorch wrote them before 2.1."""

  def rename(tensors):
    for old, new in (("g", "original0"), ("v", "original1")):
      name = f"{CONVOLUTION}.parametrizations.weight.{new}"
      tensors[f"{CONVOLUTION}.weight_{old}"] = tensors.pop(name)

  changed(RELATIVE, tmp_path, rename)
  after = models.load_pretrained(tmp_path)
  same(dict(after.kept), dict(loaded(RELATIVE).kept))


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (
      lambda t: t.pop(f"{CONVOLUTION}.parametrizations.weight.original0"),
      "weight.original0: missing; config.json requires it",
    ),
    (
      lambda t: t.update({f"{CONVOLUTION}.bias": np.ones(3, np.float32)}),
      "pos_conv_embed.conv.bias: expected shape (24,), got (3,)",
    ),
    (
      lambda t: t.pop("wav2vec2_conformer.masked_spec_embed"),
      "masked_spec_embed: missing",
    ),
    (lambda t: t.pop(f"{NORM}.running_var"), "running_var: missing; it fills"),
    (
      lambda t: t.update({f"{NORM}.running_max": np.ones(24, np.float32)}),
      "running_max: no variable of this model uses it",
    ),
  ],
)
def test_tensors_that_do_not_fit(tmp_path, spoil, message):
  assert_not_read(RELATIVE, tmp_path, message, spoil)


def test_a_config_of_its_vocabulary_alone_has_the_defaults_of_transformers():
  """Those of `Wav2Vec2ConformerConfig()` of transformers 5.24.0."""
  found = describe({"vocab_size": 41}, (), "ctc")
  config = found.config
  assert (config.num_layers, config.num_heads) == (12, 12)
  assert (config.features, config.mlp_features) == (768, 3072)
  assert (config.kernel_size, config.activation) == (31, "gelu")
  assert (config.position, config.rotary_theta) == ("transformer_xl", 10_000)
  assert config.extractor == ExtractorConfig(
    features=(512,) * 7,
    kernel_sizes=(10, 3, 3, 3, 3, 2, 2),
    strides=(5, 2, 2, 2, 2, 2, 2),
    norm="group",
    use_bias=False,
    activation="gelu",
  )
  assert config.dropout_rate == 0.1
  assert (found.max_length, found.vocab_size, found.outputs) == (5000, 41, 41)
