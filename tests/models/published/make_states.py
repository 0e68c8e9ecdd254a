"""Writes small models whose layers have states, with the logits of transformers.

    pip install torch==2.13.0 transformers==5.24.0
    OMP_NUM_THREADS=1 python tests/models/published/make_states.py

As `make_fixtures.py`, with rows padded on the right in `expected.npz` and on the left in
`left.npz`, and with single keys changed in `changed.npz`.
"""

import json

from make_fixtures import HERE, VOCAB, draw, tokens_of
import numpy as np
import torch
import transformers


def draw_states(model, seed, gain):
  """Draws weights like `draw`, with states that last for some positions."""
  draw(model, seed, gain)
  generator = torch.Generator().manual_seed(seed + 1)
  for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=generator)
    with torch.no_grad():
      if "Gemma" in type(model).__name__ and "norm" in name:
        weight.copy_(0.2 * noise)  # What they have beyond 1.
      elif name.endswith("A_log"):
        weight.copy_(0.7 * noise)
      elif name.endswith("dt_proj.bias"):
        weight.copy_(noise - 1.5)
      elif name.endswith(".D"):
        weight.copy_(1.0 + 0.3 * noise)
      elif name.endswith("recurrent_param"):
        weight.copy_(noise - 2.0)
  for name, buffer in model.named_buffers():
    if name.endswith("e_score_correction_bias"):
      buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def rows_apart(model, inputs):
  """Logits of every row without its padding, and zeros where it has some."""
  out = None
  for row in range(len(inputs["input_ids"])):
    keep = inputs["attention_mask"][row] > 0
    tokens = torch.tensor(inputs["input_ids"][row][keep][None])
    with torch.no_grad():
      logits = model(input_ids=tokens, use_cache=False).logits[0].numpy()
    if out is None:
      shape = *inputs["input_ids"].shape, logits.shape[-1]
      out = np.zeros(shape, np.float32)
    out[row, keep] = logits
  return out


def case(name, kind, config, changes, *, apart=False, gain=1.0):
  """Writes a folder.

  Args:
    name: of the folder.
    kind: a class of transformers.
    config: of the model, by name.
    changes: `{key: value}` of single keys that leave the shapes of all tensors.
    apart: whether transformers lets padding change a row, so that rows are alone.
    gain: of the kernels.
  """
  path = HERE / name
  made = getattr(transformers, kind)
  model = made(made.config_class(**config))
  draw_states(model, len(name), gain)
  model.eval().bfloat16()
  model.save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  right = tokens_of(np.random.default_rng(61), 3, 19, 0, (19, 12, 1))
  shifts = 0, 7, 18
  left = {
    x: np.stack([np.roll(row, n) for row, n in zip(y, shifts, strict=True)])
    for x, y in right.items()
  }

  def logits(inputs, **values):
    theirs = made.config_class.from_pretrained(path, **values)
    loaded = made.from_pretrained(
      path,
      config=theirs,
      attn_implementation="eager",
      experts_implementation="eager",
      dtype=torch.float32,
    ).eval()
    if apart:
      return rows_apart(loaded, inputs)
    tensors = {x: torch.tensor(y) for x, y in inputs.items()}
    with torch.no_grad():
      return loaded(**tensors, use_cache=False).logits.numpy()

  for file, inputs in (("expected", right), ("left", left)):
    arrays = {f"input.{key}": value for key, value in inputs.items()}
    arrays["float32"] = logits(inputs)
    np.savez_compressed(path / f"{file}.npz", **arrays)
  found = {
    json.dumps({key: value}): logits(right, **{key: value})
    for key, value in changes.items()
  }
  np.savez_compressed(path / "changed.npz", **found)
  size = sum(file.stat().st_size for file in path.iterdir())
  print(name, size // 1024, "KiB")


def mamba():
  """Makes Mamba and Falcon Mamba."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 22,
    "num_hidden_layers": 3,
    "state_size": 5,
    "expand": 3,
    "time_step_rank": 4,
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": None,
  }
  changes = {"layer_norm_epsilon": 0.1}
  untied = {"tie_word_embeddings": False, "use_bias": True}
  # A bias is in what convolutions read of padding there.
  case("mamba", "MambaForCausalLM", sizes | untied, changes, apart=True)
  falcon = {
    "mixer_rms_eps": 0.02,
    "use_conv_bias": False,
    "num_hidden_layers": 2,
  }
  changes = {"layer_norm_epsilon": 0.1, "mixer_rms_eps": 0.5}
  case("falcon_mamba", "FalconMambaForCausalLM", sizes | falcon, changes)


def mamba2():
  """Makes Mamba-2 with biases and with bounds of its steps."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "expand": 2,
    "num_heads": 6,
    "head_dim": 6,
    "n_groups": 2,
    "state_size": 5,
    "chunk_size": 8,
    "use_bias": True,
    "time_step_limit": [0.2, 1.5],
    "pad_token_id": None,
  }
  changes = {"time_step_limit": [0.0, 0.4]}
  case("mamba2_bias", "Mamba2ForCausalLM", sizes, changes, apart=True)


def recurrent_gemma():
  """Makes RecurrentGemma, whose layers ignore masks where they have a state."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "lru_width": 20,
    "intermediate_size": 58,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_window_size": 5,
    "attention_bias": True,
    "logits_soft_cap": 11.0,
    "rms_norm_eps": 1e-3,
    "block_types": ["recurrent", "attention"],
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": 500.0,
      "partial_rotary_factor": 0.5,
    },
    "pad_token_id": None,
  }
  rope = {
    "rope_type": "default",
    "rope_theta": 50.0,
    "partial_rotary_factor": 1.0,
  }
  changes = {
    "attention_window_size": 3,
    "logits_soft_cap": 2.0,
    "rms_norm_eps": 0.1,
    "rope_parameters": rope,
  }
  name = "recurrent_gemma"
  case(name, "RecurrentGemmaForCausalLM", sizes, changes, apart=True)


def xlstm():
  """Makes xLSTM, which reads no masks."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 3,
    "qk_dim_factor": 0.625,
    "v_dim_factor": 0.875,
    "ffn_proj_factor": 1.7,
    "ffn_round_up_to_multiple_of": 7,
    "gate_soft_cap": 3.0,
    "output_logit_soft_cap": 9.0,
    "norm_eps": 1e-3,
    "eps": 0.02,
  }
  changes = {
    "gate_soft_cap": 1.0,
    "output_logit_soft_cap": 2.0,
    "norm_eps": 0.1,
    "eps": 0.5,
  }
  case("xlstm", "xLSTMForCausalLM", sizes, changes, apart=True, gain=1.5)


HYBRID = {
  "vocab_size": VOCAB,
  "hidden_size": 20,
  "intermediate_size": 27,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 40,
  "bos_token_id": 1,
  "eos_token_id": 1,
  "pad_token_id": 0,
}


def falcon_h1():
  """Makes Falcon-H1, with all of its factors."""
  sizes = {
    **HYBRID,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "mamba_d_ssm": 24,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 8,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "time_step_limit": [0.2, 1.5],
    "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.9,
    "mlp_multipliers": [0.6, 1.4],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.6, 0.5],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 1.7,
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
  }
  factors = (
    *("lm_head", "embedding", "key", "attention_in", "attention_out"),
    *("ssm_in", "ssm_out"),
  )
  changes = {
    **{f"{name}_multiplier": 1.0 for name in factors},
    "mlp_multipliers": [1.0, 0.6],
    "ssm_multipliers": [1.0, 0.9, 1.8, 0.4, 0.8],
    "time_step_limit": [0.0, 0.4],
    "rms_norm_eps": 0.1,
    "mamba_norm_before_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
  }
  case("falcon_h1", "FalconH1ForCausalLM", sizes, changes, apart=True)
  plain = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": None,
    "mamba_expand": 2,
    "mamba_n_heads": 5,
    "mamba_n_groups": 1,
    "mamba_d_head": 8,
    "mamba_conv_bias": False,
    "mamba_rms_norm": False,
    "time_step_limit": [0.0, float("inf")],
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "tie_word_embeddings": True,
  }
  changes = {"mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5}
  case("falcon_h1_plain", "FalconH1ForCausalLM", sizes | plain, changes)


def nemotron_h():
  """Makes Nemotron-H, with two feed-forward layers in a row and without."""
  sizes = {
    **HYBRID,
    "layers_block_type": [
      *("mlp", "moe", "linear_attention", "full_attention", "mlp"),
      "linear_attention",
    ],
    "head_dim": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 8,
    "time_step_min": 0.2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 9,
    "moe_shared_expert_intermediate_size": 11,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "layer_norm_epsilon": 1e-3,
  }
  changes = {
    "time_step_min": 0.6,
    "mlp_hidden_act": "silu",
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "layer_norm_epsilon": 0.1,
  }
  case("nemotron_h", "NemotronHForCausalLM", sizes, changes)
  latent = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_groups": 1,
    "use_conv_bias": False,
    "moe_latent_size": 7,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
  }
  changes = {"norm_topk_prob": True}
  case("nemotron_h_latent", "NemotronHForCausalLM", sizes | latent, changes)
  plain = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "mlp_bias": True,
    "use_bias": True,
    "tie_word_embeddings": True,
  }
  changes = {"time_step_min": 0.9}
  name = "nemotron_h_plain"
  case(name, "NemotronHForCausalLM", sizes | plain, changes, apart=True)


def main():
  """Writes the folders."""
  for make in (mamba, mamba2, recurrent_gemma, xlstm, falcon_h1, nemotron_h):
    make()


if __name__ == "__main__":
  main()
