"""Families with latent attention: other mechanisms, configs, refusals."""

import jax
import numpy as np
import pytest

import models
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  compared,
  compute,
  expected,
  loaded,
  same,
)


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3_full_rank"])
def test_other_mechanisms_take_its_keys_and_values(case):
  """Dense attention is the same function; a window as long as the row is, too."""
  inputs, outputs = expected(case)
  window = {"name": "sliding_window", "window": 22}
  for attention in ("dense", window):
    p = models.load_pretrained(FOLDERS[case], attention=attention)
    out = compute(p, inputs)
    assert compared(inputs, out, outputs["float32"]) < 2e-5


def test_one_key_and_value_for_all_heads_start_those_of_another_mechanism(
  tmp_path,
):
  """They are trained apart, and files have both."""
  p = models.load_pretrained(FOLDERS["deepseek_v4"], attention="dense")
  own = dict(p.variables["params"]["decoder_1"]["self_attention"])
  key, value = (np.asarray(own[x]["kernel"]) for x in ("key", "value"))
  np.testing.assert_array_equal(key, value)
  np.testing.assert_array_equal(key[:, :10], key[:, 50:])
  moved = jax.tree.map(lambda x: x, p.variables)
  module = moved["params"]["decoder_1"]["self_attention"]
  module["value"] = {"kernel": 2.0 * module["value"]["kernel"]}
  models.save_pretrained(tmp_path, p._replace(variables=moved))
  same(models.load_pretrained(tmp_path).variables, moved)


YARN = {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.4}


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"num_key_value_heads": 6}, "num_key_value_heads: expected 1, got 6"),
    ({"qk_rope_head_dim": 6}, "qk_rope_head_dim: expected 4 (head_dim"),
    (
      {"partial_rotary_factor": 0.2},
      "qk_rope_head_dim: expected 2 (head_dim · partial_rotary_factor), got 4",
    ),
    ({"o_groups": 5}, "o_groups: expected a divisor of num_attention_heads"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps: expected 1e-06, got 1e-05"),
    ({"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
    ({"norm_topk_prob": False}, "norm_topk_prob: expected True, got False"),
    ({"scoring_func": "softmax"}, "scoring_func: expected one of sqrts"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types: expected 4 of"),
    ({"mlp_layer_types": ["moe"]}, "mlp_layer_types: expected 4 of hash_moe"),
    ({"hc_mult": 1}, "hc_mult: expected at least 2, got 1"),
    ({"compress_rates": {}}, "compress_rates: expected a number above 0"),
    ({"compress_rates": None}, "compress_rates: expected a value like {"),
    ({"quantization_config": {"a": 1}}, "quantization_config: FP8"),
    (
      {"rope_parameters": {"main": {"rope_theta": 9.0}, "compress": YARN}},
      "rope_parameters: expected partial_rotary_factor 0.4 in main",
    ),
    (
      {"rope_parameters": YARN, "compress_ratios": [0]},
      "compress_ratios: not supported",
    ),
  ],
)
def test_v4_configs_that_are_not_read(values, message, tmp_path):
  path = tmp_path / "config.json"
  assert_not_read("deepseek_v4", tmp_path, f"{path}: {message}", **values)


def test_one_set_of_rotary_parameters_is_that_of_entries(tmp_path):
  """As transformers reads files of the authors."""
  length = {"original_max_position_embeddings": 10}
  two = {
    "main": {"rope_theta": 30.0, "partial_rotary_factor": 0.4},
    "compress": YARN | length | {"rope_theta": 70.0, "attention_factor": 1.0},
  }
  one = {name: x for name, x in YARN.items() if name != "partial_rotary_factor"}
  thetas = {"rope_theta": 30.0, "compress_rope_theta": 70.0}
  both = {
    "two": {"rope_parameters": two},
    "one": {"rope_parameters": None, "rope_scaling": one | length, **thetas},
  }
  configs = [
    models.load_pretrained(
      changed("deepseek_v4", tmp_path / name, **values)
    ).model.config
    for name, values in both.items()
  ]
  assert configs[0] == configs[1]


@pytest.mark.parametrize(
  "values",
  [
    {"indexer_types": None, "index_topk_pattern": "FSFS"},
    {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    {"index_topk_pattern": "FFFF", "index_topk_freq": 3},
  ],
)
def test_layers_that_select_the_keys_of_an_earlier_layer(values, tmp_path):
  """Other ways to say which."""
  p = models.load_pretrained(changed("glm_moe_dsa", tmp_path, **values))
  assert p.model == loaded("glm_moe_dsa").model
  layers = p.model.config.layers("decoder_attention")
  shares = [one.build().shares_gates for one in layers]
  assert shares == [False, True, False, True]


@pytest.mark.parametrize(
  "values",
  [
    {"indexer_types": ["shared", "full", "full", "shared"]},
    {"indexer_types": ["full", "some", "full", "shared"]},
    {"indexer_types": None, "index_topk_pattern": "FS"},
  ],
)
def test_indexers_that_are_not_read(values, tmp_path):
  message = f"{[*values][-1]}: expected 4 (num_hidden_layers) entries, full or"
  assert_not_read("glm_moe_dsa", tmp_path, message, **values)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (
      {"num_key_value_heads": 1},
      "num_key_value_heads: expected 3 (num_attention_heads), got 1",
    ),
    ({"rope_interleave": False}, "rope_interleave: expected True, got False"),
    ({"rope_interleave": None}, "rope_interleave: expected True, got null"),
    (
      {"routed_scaling_factor": 0.0},
      "routed_scaling_factor: expected greater than 0, got 0.0",
    ),
    (
      {"num_experts_per_tok": 9},
      "num_experts_per_tok: expected at most the 8 experts of topk_group, got 9",
    ),
    ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc'"),
    ({"head_dim": 8}, "head_dim: expected 6 (qk_rope_head_dim), got 8"),
    ({"qk_rope_head_dim": 5}, "head_dim: expected 5 (qk_rope_head_dim)"),
  ],
)
def test_configs_that_are_not_read(values, message, tmp_path):
  path = tmp_path / "config.json"
  assert_not_read("deepseek_v3", tmp_path, f"{path}: {message}", **values)


@pytest.mark.parametrize(
  ("case", "name"),
  [
    ("deepseek_v32", "qk_rope_head_dim: expected an even number up to"),
    ("minimax_m3_text", "rope_parameters: expected partial_rotary_factor"),
    ("deepseek_v4", "decoder_attention: rotary_dim: expected at most the 2"),
  ],
)
def test_an_indexer_is_at_least_as_wide_as_its_rotation(case, name, tmp_path):
  message = f"{tmp_path / 'config.json'}: {name}"
  assert_not_read(case, tmp_path, message, index_head_dim=2)


def test_an_indexer_selects_all_local_blocks(tmp_path):
  message = f"{tmp_path / 'config.json'}: index_local_blocks: expected at most"
  values = {"index_local_blocks": 3, "index_topk_blocks": 2}
  assert_not_read("minimax_m3_text", tmp_path, message, **values)
