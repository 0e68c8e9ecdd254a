"""Writes small models with latent attention, with the logits of transformers.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/models/published/make_deepseek.py

Each folder is as `make_fixtures.py` writes it. `expected.npz` also has the logits of
the same rows with padding on the left, with the positions that transformers' generate
gives them, and the last logits of the first row with single keys of `config.json`
changed.
"""

import json
import pathlib
import shutil
import sys

from make_fixtures import VOCAB, draw, tokens_of
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SHAPE = {
  "vocab_size": VOCAB,
  "hidden_size": 22,
  "num_hidden_layers": 3,
  "num_attention_heads": 3,
  "num_key_value_heads": 3,
  "intermediate_size": 37,
  "max_position_embeddings": 40,
  "rms_norm_eps": 1e-3,
  "kv_lora_rank": 14,
  "q_lora_rank": 13,
  "qk_rope_head_dim": 6,
  "qk_nope_head_dim": 9,
  "v_head_dim": 7,
  "pad_token_id": None,
  "bos_token_id": 1,
  "eos_token_id": 1,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 70.0,
  "factor": 4.0,
  "beta_fast": 4.0,
  "original_max_position_embeddings": 10,
  "mscale": 0.8,
  "mscale_all_dim": 0.6,
}
PLAIN = {"rope_type": "default", "rope_theta": 30.0}
EXPERTS = {
  "n_routed_experts": 12,
  "n_shared_experts": 2,
  "moe_intermediate_size": 5,
  "num_experts_per_tok": 3,
  "routed_scaling_factor": 1.7,
}
V3 = SHAPE | EXPERTS | {"n_group": 3, "topk_group": 2}
V4_TYPES = [
  "sliding_attention",
  "heavily_compressed_attention",
  "compressed_sparse_attention",
  "compressed_sparse_attention",
]
V4_PLAIN = PLAIN | {"partial_rotary_factor": 0.4}
V4_YARN = {
  "rope_type": "yarn",
  "rope_theta": 70.0,
  "factor": 4.0,
  "beta_fast": 4.0,
  "original_max_position_embeddings": 10,
  "attention_factor": 1.0,
  "partial_rotary_factor": 0.4,
}
CASES = {
  "deepseek_v3": (
    "DeepseekV3ForCausalLM",
    V3
    | {
      "first_k_dense_replace": 1,
      "rope_parameters": YARN,
      "attention_bias": True,
      "hidden_act": "gelu",
    },
    [
      {"rms_norm_eps": 0.3},
      {"routed_scaling_factor": 0.6},
      {"num_experts_per_tok": 4},
      {"topk_group": 1},
      {"n_group": 6},
      {"norm_topk_prob": False},
      {"hidden_act": "silu"},
      {"rope_parameters": YARN | {"rope_theta": 30.0}},
      {"rope_parameters": YARN | {"mscale": 0.3}},
      {"rope_parameters": YARN | {"mscale_all_dim": 0.9}},
      {"rope_parameters": YARN | {"factor": 8.0}},
      {"rope_parameters": PLAIN},
    ],
  ),
  "deepseek_v3_full_rank": (
    "DeepseekV3ForCausalLM",
    V3
    | {
      "first_k_dense_replace": 2,
      "norm_topk_prob": False,
      "q_lora_rank": None,
      "rope_parameters": PLAIN,
      "tie_word_embeddings": True,
      "attention_bias": True,
    },
    [{"hidden_act": "relu"}, {"rope_parameters": YARN}],
  ),
  "deepseek_v32": (
    "DeepseekV32ForCausalLM",
    V3
    | {
      "mlp_layer_types": ["sparse", "dense", "sparse"],
      "norm_topk_prob": False,
      "hidden_act": "relu",
      "rope_parameters": YARN,
      "attention_bias": True,
      "index_topk": 5,
      # Scores of a few heads are often 0, and any of equal ones may be chosen.
      "index_n_heads": 11,
      "index_head_dim": 10,
    },
    [
      {"index_topk": 8},
      {"index_topk": 30},
      {"rope_parameters": PLAIN},
      {"rope_parameters": YARN | {"mscale_all_dim": 0.9}},
    ],
  ),
  "glm_moe_dsa": (
    "GlmMoeDsaForCausalLM",
    V3
    | {
      "num_hidden_layers": 4,
      "indexer_types": ["full", "shared", "full", "shared"],
      "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
      "rope_parameters": PLAIN,
      "attention_bias": True,
      "index_topk": 5,
      "index_n_heads": 11,
      "index_head_dim": 10,
    },
    [
      {"index_topk": 8},
      {"n_group": 6},
      {"norm_topk_prob": False},
      {"rms_norm_eps": 0.3},
      {"rope_parameters": YARN},
    ],
  ),
  "deepseek_v4": (
    "DeepseekV4ForCausalLM",
    {
      "vocab_size": VOCAB,
      "hidden_size": 22,
      "num_hidden_layers": 4,
      "num_attention_heads": 6,
      "head_dim": 10,
      "q_lora_rank": 13,
      "o_groups": 3,
      "o_lora_rank": 4,
      "partial_rotary_factor": 0.4,
      "sliding_window": 5,
      "layer_types": V4_TYPES,
      "compress_rates": {V4_TYPES[1]: 5, V4_TYPES[2]: 3},
      "index_n_heads": 11,
      "index_head_dim": 8,
      "index_topk": 2,
      "rope_parameters": {"main": V4_PLAIN, "compress": V4_YARN},
      "moe_intermediate_size": 6,
      "n_routed_experts": 5,
      "num_experts_per_tok": 2,
      "routed_scaling_factor": 1.7,
      "swiglu_limit": 0.9,
      "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
      "hc_mult": 3,
      "hc_sinkhorn_iters": 4,
      "hc_eps": 1e-2,
      "max_position_embeddings": 40,
      "pad_token_id": None,
      "bos_token_id": 1,
      "eos_token_id": 1,
    },
    [
      {"sliding_window": 3},
      {"index_topk": 1},
      {"index_topk": 30},
      {"routed_scaling_factor": 0.6},
      {"scoring_func": "sigmoid"},
      {"swiglu_limit": 10.0},
      {"hc_sinkhorn_iters": 1},
      {"hc_eps": 0.1},
      {"hidden_act": "gelu"},
      {"rope_parameters": {"main": V4_PLAIN, "compress": V4_PLAIN}},
      {
        "rope_parameters": {
          "main": V4_PLAIN | {"rope_theta": 300.0},
          "compress": V4_YARN,
        }
      },
    ],
  ),
  # Rotated as a whole, heads have no other features.
  "deepseek_v4_whole": (
    "DeepseekV4ForCausalLM",
    {
      "vocab_size": VOCAB,
      "hidden_size": 14,
      "num_hidden_layers": 3,
      "num_attention_heads": 2,
      "head_dim": 6,
      "q_lora_rank": 5,
      "o_groups": 1,
      "o_lora_rank": 3,
      "partial_rotary_factor": 1.0,
      "rope_parameters": {
        "main": PLAIN | {"partial_rotary_factor": 1.0},
        "compress": V4_YARN | {"partial_rotary_factor": 1.0},
      },
      "sliding_window": 5,
      "layer_types": V4_TYPES[:3],
      "compress_rates": {V4_TYPES[1]: 5, V4_TYPES[2]: 3},
      "index_n_heads": 9,
      "index_head_dim": 6,
      "index_topk": 2,
      "moe_intermediate_size": 4,
      "n_routed_experts": 3,
      "num_experts_per_tok": 2,
      "mlp_layer_types": ["moe"] * 3,
      "hc_mult": 2,
      "max_position_embeddings": 40,
      "pad_token_id": None,
      "bos_token_id": 1,
      "eos_token_id": 1,
    },
    [{"sliding_window": 3}],
  ),
  "minimax_m3_text": (
    "MiniMaxM3VLForCausalLM",
    {
      "vocab_size": VOCAB,
      "hidden_size": 22,
      "num_hidden_layers": 4,
      "num_attention_heads": 6,
      "num_key_value_heads": 2,
      "head_dim": 10,
      "intermediate_size": 9,
      "dense_intermediate_size": 37,
      "shared_intermediate_size": 7,
      "max_position_embeddings": 40,
      "rms_norm_eps": 1e-3,
      "num_local_experts": 8,
      "num_experts_per_tok": 3,
      "routed_scaling_factor": 1.7,
      "rotary_dim": 4,
      "rope_parameters": PLAIN | {"partial_rotary_factor": 0.4},
      "swiglu_alpha": 1.3,
      "swiglu_limit": 0.8,
      "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
      "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
      "index_n_heads": 2,
      "index_head_dim": 6,
      "index_block_size": 3,
      "index_topk_blocks": 3,
      "index_local_blocks": 2,
      "pad_token_id": None,
      "bos_token_id": 1,
      "eos_token_id": 1,
    },
    [
      {"index_topk_blocks": 2},
      {"index_topk_blocks": 5},
      {"index_local_blocks": 1},
      {"index_local_blocks": 0},
      {"index_block_size": 4},
      {"rms_norm_eps": 0.3},
      {"swiglu_alpha": 2.0},
      {"swiglu_limit": 2.0},
      {"num_experts_per_tok": 2},
      {"routed_scaling_factor": 0.6},
      {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.2}},
    ],
  ),
}


def left(inputs):
  """Moves the padding of rows to the left."""
  lengths = inputs["attention_mask"].sum(1)
  total = inputs["input_ids"].shape[1]
  return {
    name: np.stack(
      [np.roll(x, total - n) for x, n in zip(array, lengths, strict=True)]
    )
    for name, array in inputs.items()
  }


def run(path, kind, inputs):
  """Returns the logits of a folder."""
  options = {"attn_implementation": "eager", "experts_implementation": "eager"}
  options["dtype"] = torch.float32
  made = getattr(transformers, kind).from_pretrained(path, **options).eval()
  with torch.no_grad():
    out = made(**{key: torch.tensor(x) for key, x in inputs.items()})
  return out.logits.numpy()


def make(name, kind, config, changes):
  """Writes a folder, with logits of padding on the left and of changed keys."""
  folder = HERE / name
  shutil.rmtree(folder, ignore_errors=True)
  made = getattr(transformers, kind)
  model = made(made.config_class(**config))
  draw(model, len(name), 1.5)
  generator = torch.Generator().manual_seed(len(name))
  for buffer_name, buffer in model.named_buffers():
    if buffer_name.endswith("e_score_correction_bias"):
      buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    if buffer_name.endswith("tid2eid"):
      chosen = torch.rand(len(buffer), 5, generator=generator).argsort(1)
      buffer.copy_(chosen[:, : buffer.shape[1]])
  model.bfloat16().save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  inputs = tokens_of(np.random.default_rng(len(name)), 3, 23, None, (23, 14, 2))
  moved, out = left(inputs), run(folder, kind, inputs)
  arrays = {f"input.{key}": x for key, x in inputs.items()} | {"float32": out}
  positions = (moved["attention_mask"].cumsum(1) - 1).clip(min=0)
  if not name.startswith(
    ("minimax", "deepseek_v4")
  ):  # There, blocks shift with padding.
    arrays["left"] = run(folder, kind, moved | {"position_ids": positions})
  path = folder / "config.json"
  config = json.loads(path.read_text())
  for change in changes:
    path.write_text(json.dumps(config | change))
    arrays[json.dumps(change)] = run(folder, kind, inputs)[0, -5:]
  path.write_text(json.dumps(config, indent=2) + "\n")
  np.savez_compressed(folder / "expected.npz", **arrays)
  size = sum(file.stat().st_size for file in folder.iterdir())
  print(f"{name:32s} {size / 1024:7.0f} KiB", flush=True)


if __name__ == "__main__":
  for name in sys.argv[1:] or CASES:
    make(name, *CASES[name])
