"""Models whose layers have states: configs, maps, other mechanisms, refusals."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  expected,
  loaded,
)


@pytest.mark.parametrize(
  "values",
  [
    {"layers_block_type": None, "hybrid_override_pattern": "-EM*-M"},
    {
      "layers_block_type": ["mlp", "moe", "mamba", "attention", "mlp", "mamba"],
      "num_hidden_layers": 9,
    },
    # What its class does not read.
    {
      "sliding_window": 3,
      "time_step_limit": [0.5, 0.6],
      "attention_bias": True,
    },
  ],
)
def test_other_configs_of_the_same_model(values, tmp_path):
  p = models.load_pretrained(changed("nemotron_h", tmp_path, **values))
  assert p.model == loaded("nemotron_h").model


def test_maps_of_both_mechanisms_of_a_layer():
  p = loaded("falcon_h1_plain")
  inputs = jnp.asarray(expected("falcon_h1_plain")[0]["input_ids"])
  maps = models.attention_maps(p.model, p.variables, {"inputs": inputs})
  heads = {"self_attention": 4, "second_attention": 5}
  length = inputs.shape[1]
  assert {name: x.shape for name, x in maps.items()} == {
    f"decoder_{i}/{name}": (3, number, length, length)
    for i in range(3)
    for name, number in heads.items()
  }


@pytest.mark.parametrize(
  "attention", ["sliding_window:window=4", "lsh", "gated_delta"]
)
@pytest.mark.parametrize("case", ["mamba", "falcon_mamba", "recurrent_gemma"])
def test_another_mechanism_has_the_inputs_of_the_state(
  case, attention, tmp_path
):
  """As its queries, keys and values; a folder of it has them once."""
  name, _, window = attention.partition(":")
  options = {"window": 4} if window else {}
  chosen = {"name": name, **options}
  p = models.load_pretrained(FOLDERS[case], attention=chosen)
  layer = p.variables["params"]["decoder_0"]["self_attention"]
  np.testing.assert_array_equal(
    layer["query"]["kernel"], layer["value"]["kernel"]
  )
  models.save_pretrained(tmp_path, p)
  tensors = load_file(tmp_path / "model.safetensors")
  own = load_file(FOLDERS[case] / "model.safetensors")
  mixers = {n for n in own if "in_proj" in n or "linear_x" in n}
  for one in mixers:
    np.testing.assert_array_equal(tensors[one], np.float32(own[one]))


@pytest.mark.parametrize(
  ("case", "values", "message"),
  [
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ("falcon_h1", {"mamba_n_heads": 5}, "mamba_n_heads: expected a divisor of"),
    ("falcon_h1", {"mamba_d_head": 6}, "mamba_d_head: expected 4 (mamba_"),
    (
      "falcon_h1",
      {"mlp_multipliers": [1.0]},
      "mlp_multipliers: expected 2 num",
    ),
    ("falcon_h1", {"time_step_limit": [2.0, 1.5]}, "time_step_limit: expected"),
    ("falcon_h1", {"time_step_limit": 0.5}, "time_step_limit: expected two"),
    (
      "nemotron_h",
      {"layers_block_type": ["mlp", "s"]},
      "layers_block_type: ex",
    ),
    ("nemotron_h", {"layers_block_type": []}, "layers_block_type: expected"),
    ("nemotron_h", {"attention_head_dim": 7}, "attention_head_dim: expected 6"),
    ("nemotron_h", {"mlp_bias": True}, "mlp_bias: expected False, got True"),
    ("nemotron_h", {"mamba_n_groups": 2}, "mamba_n_groups: not supported"),
    (
      "nemotron_h",
      {"layers_block_type": None, "hybrid_override_pattern": "M-X"},
      "hybrid_override_pattern: expected entries among *, M, E, -, got ",
    ),
    ("mamba", {"conv_kernel": 3}, "conv_kernel: expected 4, got 3"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ("mamba", {"intermediate_size": 44}, "intermediate_size: expected 66"),
    ("mamba", {"time_step_rank": "large"}, "time_step_rank: expected a valid"),
    ("mamba", {"mixer_rms_eps": 0.1}, "mixer_rms_eps: "),
    ("falcon_mamba", {"mixer_rms_eps": 0.0}, "mixer_rms_eps: expected greater"),
    ("xlstm", {"weight_mode": "fused"}, "weight_mode: expected 'single'"),
    ("xlstm", {"use_bias": True}, "use_bias: expected False"),
    ("xlstm", {"num_blocks": 4}, "num_blocks: expected 3 (num_hid"),
    ("xlstm", {"qk_dim_factor": 0.6}, "qk_dim_factor: expected a multiple of"),
    ("recurrent_gemma", {"conv1d_width": 3}, "conv1d_width: expected 4, got 3"),
    ("recurrent_gemma", {"lru_width": 21}, "lru_width: expected a multiple of"),
    ("recurrent_gemma", {"block_types": []}, "block_types: expected a list of"),
    ("recurrent_gemma", {"block_types": ["local"]}, "block_types: expected a"),
    ("recurrent_gemma", {"head_dim": 8}, "head_dim: expected 12 (hidden_size"),
    ("recurrent_gemma", {"sliding_window": 9}, "sliding_window: expected"),
    ("recurrent_gemma", {"intermediate_size": 59}, "intermediate_size: expect"),
    *(
      (
        "recurrent_gemma",
        {"rope_parameters": None, key: {"rope_type": "dynamic"}},
        f"{key}: expected rope_type 'default'",
      )
      for key in ("rope_parameters", "rope_scaling")
    ),
    (
      "recurrent_gemma",
      {"hidden_activation": "gelu"},
      "hidden_activation: expected 'gelu_pytorch_tanh'",
    ),
  ],
)
def test_configs_that_are_not_read(case, values, message, tmp_path):
  path = tmp_path / "config.json"
  assert_not_read(case, tmp_path, f"{path}: {message}", **values)
