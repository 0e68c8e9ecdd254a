"""Published Conformers: what is in their folders beside a Transformer's."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from projects.speech import features as speech_features
from tests.models.published.test_equality import (
  FOLDERS,
  compared,
  compute,
  expected,
)

RELATIVE, ROTARY = "wav2vec2_conformer_relative", "wav2vec2_conformer_rotary"
CONVOLUTION = "wav2vec2_conformer.encoder.pos_conv_embed.conv"
NORM = "wav2vec2_conformer.encoder.layers.1.conv_module.batch_norm"


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(FOLDERS[RELATIVE], tmp_path / "model")
  return tmp_path / "model"


def change(folder, function):
  path = folder / "model.safetensors"
  tensors = load_file(path)
  function(tensors)
  save_file(tensors, path)


@pytest.mark.parametrize(
  ("case", "changes"),
  [
    (RELATIVE, {"position": "none"}),
    (RELATIVE, {"mask_convolution": True}),
    (ROTARY, {"position": "rotary"}),
    (ROTARY, {"rotary_theta": 10000.0}),
  ],
)
def test_each_choice_can_be_seen_in_the_fixtures(case, changes):
  """Another choice gives other logits: equality tells what is right."""
  p = models.load_pretrained(FOLDERS[case])
  inputs, outputs = expected(case)
  fields = vars(p.model.config) | changes
  other = p.model.clone(config=models.ConformerConfig(**fields))
  out = compute(p._replace(model=other), inputs)
  assert compared(inputs, out, outputs["float32"]) > 1e-2


@pytest.mark.parametrize("name", ["batch_stats", "key_bias", "position_bias"])
def test_each_variable_can_be_seen_in_the_fixtures(name):
  p = models.load_pretrained(FOLDERS[RELATIVE])
  inputs, outputs = expected(RELATIVE)

  def other(path, leaf):
    is_named = name in jax.tree_util.keystr(path)
    return jnp.ones_like(leaf) if is_named else leaf

  variables = jax.tree_util.tree_map_with_path(other, p.variables)
  out = compute(p._replace(variables=variables), inputs)
  assert compared(inputs, out, outputs["float32"]) > 1e-2


def test_padding_does_not_matter():
  """With norms of each frame, what padding holds changes no logit."""
  p = models.load_pretrained(FOLDERS[RELATIVE])
  inputs, _ = expected(RELATIVE)
  noise = np.random.default_rng(0).standard_normal(
    inputs["input_values"].shape, np.float32
  )
  is_padding = inputs["attention_mask"] == 0
  other = np.where(is_padding, 1e3 * noise, inputs["input_values"])
  extractor = p.model.config.extractor
  length = compute(p, inputs).shape[1]
  kept = speech_features.kept_positions(
    extractor, jnp.asarray(inputs["attention_mask"] != 0), length
  )
  assert kept.sum(1).tolist() == [30, 19, 2]
  np.testing.assert_array_equal(
    compute(p, inputs), compute(p, inputs | {"input_values": other})
  )


def test_weight_norm_by_its_old_names(folder):
  """`weight_g` and `weight_v`, as PyTorch wrote them before 2.1."""

  def rename(tensors):
    for old, new in (("g", "original0"), ("v", "original1")):
      name = f"{CONVOLUTION}.parametrizations.weight.{new}"
      tensors[f"{CONVOLUTION}.weight_{old}"] = tensors.pop(name)

  before = models.load_pretrained(folder)
  change(folder, rename)
  after = models.load_pretrained(folder)
  assert set(after.kept) == set(before.kept)
  for name, array in before.kept.items():
    np.testing.assert_array_equal(after.kept[name], array)


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (
      lambda t: t.pop(f"{CONVOLUTION}.parametrizations.weight.original0"),
      "weight.original0: missing; config.json asks for it",
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
      "running_max: no variable of this model takes it",
    ),
  ],
)
def test_tensors_that_do_not_fit(folder, spoil, message):
  change(folder, spoil)
  with pytest.raises(ValueError, match=re.escape(message)) as info:
    models.load_pretrained(folder)
  assert str(info.value).startswith(str(folder))


@pytest.mark.thorough
def test_mechanisms(tmp_path):
  """One that has no tables by distance is refused; others come and go."""
  with pytest.raises(ValueError, match=r"cannot carry relative positions"):
    models.load_pretrained(FOLDERS[RELATIVE], attention="performer")
  chosen = {"name": "performer", "num_features": 16}
  p = models.load_pretrained(FOLDERS[ROTARY], attention=chosen)
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert models.slots(again.model.config) == "performer"
  inputs, outputs = expected(ROTARY)
  np.testing.assert_array_equal(compute(again, inputs), compute(p, inputs))
  dense = models.load_pretrained(tmp_path, attention="dense")
  out = compute(dense, inputs)
  assert compared(inputs, out, outputs["float32"]) < 2e-5
