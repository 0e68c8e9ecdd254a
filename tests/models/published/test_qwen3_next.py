"""Qwen3-Next: layers that differ in heads and widths, generation, refusals."""

import numpy as np
import pytest

import models
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  compute,
  expected,
  loaded,
  same,
)

CASE = "qwen3_next"


def tokens():
  """The rows of the folder, and their logits by transformers."""
  inputs, outputs = expected(CASE)
  return inputs["input_ids"], inputs["attention_mask"], outputs["float32"]


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"num_experts": True}, "num_experts: expected a valid integer"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor: missing"),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim: expected 4"),
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected 4 of linear"),
    (
      {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
      "layer_types: expected 4 of linear_attention and full_attention",
    ),
    (
      {"linear_num_key_heads": 4},
      "linear_num_key_heads: expected a divisor of linear_num_value_heads",
    ),
    (
      {"partial_rotary_factor": 0.2},
      "rope_parameters: rotary rotates pairs and needs an even head_dim, got",
    ),
  ],
)
def test_configs_that_are_not_read(values, message, tmp_path):
  path = tmp_path / "config.json"
  assert_not_read(CASE, tmp_path, f"{path}: {message}", **values)


def test_layers_without_their_types_are_three_to_one(tmp_path):
  changed(CASE, tmp_path, layer_types=None)
  assert models.load_pretrained(tmp_path).model == loaded(CASE).model


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
  """Transformers does not read them either."""
  more = {"mtp.fc.weight": np.ones((24, 48), np.float32)}
  changed(CASE, tmp_path, lambda tensors: tensors.update(more))
  found = models.load_pretrained(tmp_path).variables
  same(found, loaded(CASE).variables)


@pytest.mark.parametrize(
  "place", ["linear_attn.in_proj_ba", "self_attn.q_proj"]
)
def test_a_tensor_in_the_wrong_layer_is_refused(place, tmp_path):
  """Each layer has the tensors of its kind, and no others."""
  here, there = (0, 3) if place.startswith("linear") else (3, 0)
  wrong = f"model.layers.{there}.{place}.weight"

  def move(tensors):
    tensors[wrong] = tensors[f"model.layers.{here}.{place}.weight"]

  message = f"{wrong}: no variable of this model"
  assert_not_read(CASE, tmp_path, message, move)


def test_what_replaces_both_mechanisms_keeps_what_is_around():
  """Exact attention in every layer, which transformers has in the last alone."""
  ids, _, wanted = tokens()

  def logits(attention):
    p = models.load_pretrained(FOLDERS[CASE], attention=attention)
    return compute(p, {"input_ids": ids})

  assert np.abs(logits("flash") - wanted).max() > 0.1 * np.abs(wanted).max()
  # In the last layer alone it is the published model.
  in_last = logits(["gated_delta"] * 3 + ["flash"])
  own = compute(loaded(CASE), {"input_ids": ids})
  assert np.abs(in_last - own).max() < 2e-5 * np.abs(own).max()


def test_a_run_of_it_is_told_what_no_family_has():
  p = loaded(CASE)
  with pytest.raises(
    ValueError, match=r"^no published family fits this model: "
  ):
    models.as_pretrained(p.model, p.variables)
