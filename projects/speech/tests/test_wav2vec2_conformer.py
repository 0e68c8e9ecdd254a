"""Published Conformers: what is in their folders beside a Transformer's."""

import numpy as np
import pytest

import models
from projects.speech import features as speech_features
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
