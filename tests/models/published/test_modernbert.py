"""ModernBERT: layers that differ, other mechanisms, and what it refuses."""

import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  compared,
  compute,
  expected,
)


def test_another_mechanism_can_take_its_place_and_give_it_back(tmp_path):
  p = models.load_pretrained(FOLDERS["modernbert"], attention="flash")
  models.save_pretrained(tmp_path, p)
  assert models.slots(models.load_pretrained(tmp_path).model.config) == "flash"
  chosen = ["dense", {"name": "sliding_window", "window": 4}]
  own = models.load_pretrained(tmp_path, attention=chosen)
  inputs, outputs = expected("modernbert")
  assert compared(inputs, compute(own, inputs), outputs["float32"]) < 2e-5


def test_the_head_follows_the_base_model(tmp_path):
  """E · norm(silu(W · h + b)) + c of the features of `ModernBertModel`."""
  tensors = load_file(FOLDERS["modernbert"] / "model.safetensors")
  base = [name for name in tensors if name.startswith("model.")]

  def strip(found):
    found.clear()
    found |= {name.removeprefix("model."): tensors[name] for name in base}

  changed("modernbert", tmp_path, strip, architectures=["ModernBertModel"])
  p = models.load_pretrained(tmp_path)
  inputs, outputs = expected("modernbert")
  x = compute(p, inputs).astype(np.float64)
  head = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
  x = x @ head["head.dense.weight"].T + head["head.dense.bias"]
  x /= 1.0 + np.exp(-x)
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1) + 1e-3)[..., None]
  x = x * head["head.norm.weight"] + head["head.norm.bias"]
  out = x @ head["decoder.weight"].T + head["decoder.bias"]
  assert compared(inputs, out, outputs["float32"]) < 2e-5
  models.save_pretrained(tmp_path / "again", p)
  again = load_file(tmp_path / "again/model.safetensors")
  assert set(again) == {name.removeprefix("model.") for name in base}


@pytest.mark.parametrize(
  ("case", "values", "message"),
  [
    (
      "modernbert",
      {"layer_types": ["full_attention"] * 4},
      "global_attn_every_n_layers: 2 contradicts layer_types",
    ),
    (
      "modernbert_classes",
      {"layer_types": ["full_attention"]},
      "layer_types: expected 4 of",
    ),
    (
      "modernbert_classes",
      {"classifier_pooling": "max"},
      "classifier_pooling: expected one of cls, mean, got 'max'",
    ),
    ("modernbert", {"rope_theta": 5.0}, "rope_theta: not supported"),
    ("modernbert", {"global_rope_theta": None}, "global_rope_theta: "),
    (
      "modernbert",
      {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
      "rope_theta: the file has two different values, 5.0 (rope_parameters) and "
      "700.0 (global_rope_theta)",
    ),
    ("modernbert", {"norm_bias": False}, "norm.bias: no variable of this"),
    ("modernbert", {"decoder_bias": False}, "decoder.bias: no variable of"),
    ("modernbert", {"tie_word_embeddings": True}, "decoder.weight: differs"),
    ("modernbert_classes", {"norm_bias": True}, "norm.bias: missing"),
    ("modernbert_classes", {"mlp_bias": False}, ".bias: no variable of this"),
  ],
)
def test_what_the_files_do_not_hold_is_refused(tmp_path, case, values, message):
  assert_not_read(case, tmp_path, message, **values)


def test_a_window_that_reaches_over_all_positions_is_none(tmp_path):
  """As the default of 128 does in a model of few positions."""
  wide, longest = (
    models.load_pretrained(
      changed("modernbert", tmp_path / str(width), local_attention=width)
    )
    for width in (128, 126)
  )
  names = [
    {layer.name for layer in p.model.config.layers("encoder_attention")}
    for p in (wide, longest)
  ]
  assert names == [{"dense"}, {"dense", "sliding_window"}]
  inputs = {"input_ids": np.arange(1, 61)[None]}
  np.testing.assert_allclose(
    compute(wide, inputs), compute(longest, inputs), atol=1e-5
  )
