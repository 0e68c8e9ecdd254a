"""Plain decoders and encoders: refusals, and XLM-RoBERTa."""

import pytest

import models
from models.published import files
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  loaded,
  same,
)

LONG = {"rope_type": "longrope", "rope_theta": 7.0, "short_factor": [1.0]}


@pytest.mark.parametrize(
  ("case", "values", "message"),
  [
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_atten"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation: expected"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling: expected a number"),
    ("granite", {"attention_multiplier": -1.0}, "attention_multiplier: exp"),
    ("phi3", {"rope_parameters": LONG}, "rope_parameters: expected rope_typ"),
    ("phi3", {"rope_scaling": {"type": "su"}}, "rope_scaling: expected rope"),
    ("phi3", {"rope_scaling": 3}, "rope_scaling: expected named values"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 4 of 0"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: expected 4"),
    ("smollm3", {"sliding_window": ...}, "sliding_window: missing"),
    ("smollm3", {"use_sliding_window": False}, "use_sliding_window: expected"),
    ("cohere2", {"head_dim": 7}, "head_dim: expected 6"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm: expected False"),
    ("cohere2", {"sliding_window": None}, "sliding_window: expected a value"),
    ("deberta_v2", {"conv_kernel_size": 3}, "conv_kernel_size: expected 0"),
    ("deberta_v2", {"embedding_size": 8}, "embedding_size: expected 24"),
    ("deberta_v2", {"pos_att_type": "c2p|p2p"}, "pos_att_type: expected c2p"),
    ("deberta_v2", {"pos_att_type": ["c2p"] * 2}, "pos_att_type: expected c2p"),
    ("deberta_v2", {"pos_att_type": 3}, "pos_att_type: expected a"),
    (
      "deberta_v2",
      {"position_biased_input": True},
      "position_biased_input: ex",
    ),
    ("deberta_v2", {"max_relative_positions": 4}, "max_relative_positions: e"),
    (
      "deberta_v2",
      {"relative_attention": False},
      "max_relative_positions: exp",
    ),
    (
      "opt",
      {"layer_norm_elementwise_affine": False},
      "layer_norm_elementwise_affine: expected True",
    ),
  ],
)
def test_configs_that_are_not_read(case, values, message, tmp_path):
  path = tmp_path / "config.json"
  assert_not_read(case, tmp_path, f"{path}: {message}", **values)


@pytest.mark.parametrize("head", ["", "_masked", "_classes"])
def test_xlm_roberta_is_roberta_by_another_name(head, tmp_path):
  case = f"xlm_roberta{head}"
  theirs = files.read_config(FOLDERS[case])["architectures"][0]
  names = [theirs.replace("XLMRoberta", "Roberta")]
  changed(case, tmp_path, architectures=names, model_type="roberta")
  p = models.load_pretrained(tmp_path)
  assert p.model == loaded(case).model
  same(p.variables, loaded(case).variables)
