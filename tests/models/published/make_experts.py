"""Writes small decoders with experts or several mechanisms, and their logits.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/models/published/make_experts.py

Writes a folder for each case as `make_fixtures.py` does. `expected.npz` also has the
logits of rows that are padded on the left, and those of the same weights with a single
key of `config.json` changed.
"""

import json
import pathlib
import shutil
import sys

from make_deepseek import CASES
from make_fixtures import draw
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB = 31
LENGTH = 17


def draw_experts(model, gain, seed):
  """Kernels of experts, which are three-dimensional, and constants of routers."""
  generator = torch.Generator().manual_seed(seed)
  both = [*model.named_parameters(), *model.named_buffers()]
  for name, weight in both:
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith(("gate_up_proj", "down_proj")):
      is_transposed = "GptOss" in type(model).__name__
      fan_in = weight.shape[1 if is_transposed else 2]
      value = gain * noise / fan_in**0.5
    elif name.endswith("proj_bias") and weight.ndim == 2:
      value = 0.2 * noise
    elif name.endswith("e_score_correction_bias"):
      value = 0.3 * noise
    elif name.endswith("sinks"):
      value = noise
    else:
      continue
    with torch.no_grad():
      weight.copy_(value)


QWEN_IMAGES = {"depth": 1, "num_heads": 2, "num_position_embeddings": 4}
MINIMAX_IMAGES = {"num_hidden_layers": 1, "num_attention_heads": 2}
MINIMAX_IMAGES |= {"image_size": 4}


def multimodal(name, kind, text, images, **more):
  """Writes a folder of a model of images and text, and logits of text alone."""
  if len(sys.argv) > 1 and name not in sys.argv[1:]:
    return
  path = HERE / "multimodal" / name
  shutil.rmtree(path, ignore_errors=True)
  made = getattr(transformers, kind)
  images |= {"hidden_size": 8, "intermediate_size": 6, "patch_size": 2}
  more["tie_word_embeddings"] = text["tie_word_embeddings"]
  config = made.config_class(text_config=text, vision_config=images, **more)
  model = made(config)
  draw(model, 5, 1.5)
  draw_experts(model, 1.5, 5)
  model.eval().bfloat16().save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  tokens = np.random.default_rng(5).integers(5, VOCAB, (2, LENGTH))
  out = logits(made, path, {}, tokens, None)
  np.savez_compressed(path / "expected.npz", input_ids=tokens, float32=out)


def case(name, kind, config, changes, gain=1.5):
  """Writes a folder.

  Args:
    name: of the folder.
    kind: a class of transformers.
    config: of the model, by name.
    changes: single keys with other values, whose logits are written, too.
    gain: of the kernels.
  """
  if len(sys.argv) > 1 and name not in sys.argv[1:]:
    return
  path = HERE / name
  shutil.rmtree(path, ignore_errors=True)
  made = getattr(transformers, kind)
  model = made(made.config_class(**config))
  draw(model, len(name), gain)
  draw_experts(model, gain, len(name))
  # No reader rounds frequencies and decays.
  exact = {
    x: b
    for x, b in model.named_buffers()
    if x.endswith(("inv_freq", "_decay", "slope_rate"))
  }
  model.eval().bfloat16()
  for place, buffer in exact.items():
    place, _, leaf = place.rpartition(".")
    setattr(model.get_submodule(place), leaf, buffer)
  model.save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  tokens = np.random.default_rng(len(name)).integers(5, VOCAB, (3, LENGTH))
  places = np.arange(LENGTH)[None, :]
  lengths = np.array([[LENGTH], [11], [1]])
  masks = {"right": places < lengths, "left": places >= LENGTH - lengths}
  arrays = {"input.input_ids": tokens}
  for side, mask in masks.items():
    mask = mask.astype(np.int64)
    key = "input.attention_mask" if side == "right" else "left.attention_mask"
    arrays[key] = mask
    out = logits(made, path, {}, tokens, mask)
    arrays["float32" if side == "right" else "left.float32"] = out
  for key, other in changes.items():
    out = logits(made, path, {key: other}, tokens, None)
    arrays[f"changed.{json.dumps({key: other})}"] = out
  np.savez_compressed(path / "expected.npz", **arrays)
  size = sum(file.stat().st_size for file in path.iterdir())
  print(f"{name:32s} {size / 1024:7.0f} KiB", flush=True)


def logits(made, path, changes, tokens, mask):
  """Logits of the weights of a folder, with keys of its config changed."""
  content = json.loads((path / "config.json").read_text()) | changes
  config = made.config_class.from_dict(content)
  options = {"attn_implementation": "eager", "dtype": torch.float32}
  options["experts_implementation"] = "eager"
  model = made.from_pretrained(path, config=config, **options).eval()
  mask = None if mask is None else torch.tensor(mask)
  with torch.no_grad():
    return model(torch.tensor(tokens), attention_mask=mask).logits.numpy()


DECODER = {
  "vocab_size": VOCAB,
  "hidden_size": 20,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 6,
  "intermediate_size": 13,
  "max_position_embeddings": 40,
  "rms_norm_eps": 1e-3,
  "bos_token_id": 1,
  "eos_token_id": 1,
  "pad_token_id": 0,
}
EXACT, LINEAR, NEAR = "full_attention", "linear_attention", "sliding_attention"
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
OTHER_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}


def main():
  """Makes all of them."""
  mixtral = (
    DECODER
    | THETA
    | {
      "hidden_act": "gelu",
      "num_local_experts": 5,
      "num_experts_per_tok": 3,
      "sliding_window": 7,
    }
  )
  case(
    "mixtral",
    "MixtralForCausalLM",
    mixtral,
    {
      "num_experts_per_tok": 2,
      "sliding_window": 3,
      "hidden_act": "silu",
      "rms_norm_eps": 0.3,
      **OTHER_THETA,
    },
  )
  qwen3_moe = (
    DECODER
    | THETA
    | {
      "attention_bias": True,
      "num_experts": 6,
      "num_experts_per_tok": 2,
      "moe_intermediate_size": 7,
      "norm_topk_prob": True,
      "mlp_only_layers": [1],
      "tie_word_embeddings": True,
    }
  )
  case(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qwen3_moe,
    {
      "num_experts_per_tok": 4,
      "norm_topk_prob": False,
      "hidden_act": "relu",
      **OTHER_THETA,
    },
  )
  windows = qwen3_moe | {
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "sliding_window": 6,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
  }
  changes = {"use_sliding_window": False, "sliding_window": 4}
  case("qwen3_moe_windows", "Qwen3MoeForCausalLM", windows, changes)
  recurrent = DECODER | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": 300.0,
      "partial_rotary_factor": 0.5,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 5,
    "layer_types": [LINEAR, EXACT, LINEAR, LINEAR],
  }
  experts = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 9,
  }
  quarter = THETA["rope_parameters"] | {"partial_rotary_factor": 0.25}
  changes = {"rms_norm_eps": 0.3, "rope_parameters": quarter}
  some = {"norm_topk_prob": False, "mlp_only_layers": [2]}
  qwen3_next = recurrent | experts | some
  case(
    "qwen3_next_experts",
    "Qwen3NextForCausalLM",
    qwen3_next,
    {"norm_topk_prob": True, "num_experts_per_tok": 2, **changes},
  )
  qwen3_5 = recurrent | {"attention_bias": True, "tie_word_embeddings": True}
  case("qwen3_5_text", "Qwen3_5ForCausalLM", qwen3_5, changes)
  # Sections of the positions of images change nothing of text.
  sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
  case(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    recurrent | experts | {"attention_bias": True},
    {"num_experts_per_tok": 2, "rope_parameters": quarter | sections},
  )
  yarn = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 10,
  }
  gpt_oss = DECODER | {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 0.9,
    "layer_types": [NEAR, EXACT, NEAR],
    "rope_parameters": yarn,
  }
  case(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss,
    {
      "num_experts_per_tok": 2,
      "sliding_window": 3,
      "swiglu_alpha": 0.7,
      "swiglu_limit": 1.5,
      "layer_types": [EXACT, EXACT, NEAR],
      "rope_parameters": yarn | {"factor": 9.0},
    },
  )
  others = {"attention_bias": False, "tie_word_embeddings": True}
  others |= {"layer_types": [EXACT, NEAR, NEAR], "num_local_experts": 4}
  case(
    "gpt_oss_tied", "GptOssForCausalLM", gpt_oss | others | THETA, OTHER_THETA
  )
  steps = yarn | {
    "original_max_position_embeddings": 4,
    "factor": 10.0,
    "llama_4_scaling_beta": 0.4,
    "mscale": 0.8,
    "mscale_all_dim": 0.3,
    "truncate": True,
  }
  ministral3 = DECODER | {
    "hidden_act": "gelu",
    "sliding_window": 7,
    "rope_parameters": steps,
  }
  case(
    "ministral3",
    "Ministral3ForCausalLM",
    ministral3,
    {
      # The longest sequence changes nothing.
      "rope_parameters": steps
      | {"llama_4_scaling_beta": 0.9, "max_position_embeddings": 40},
      "sliding_window": None,
    },
  )
  olmo = {x: recurrent[x] for x in recurrent if x != "head_dim"} | THETA
  olmo |= {"hidden_size": 24, "layer_types": [LINEAR, EXACT, LINEAR, EXACT]}
  olmo |= {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
  case(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    olmo | {"attention_bias": True},
    {"linear_allow_neg_eigval": False, "rms_norm_eps": 0.3, **OTHER_THETA},
  )
  # Files of the authors have no positions.
  none = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
  none |= {"linear_allow_neg_eigval": False, "tie_word_embeddings": True}
  case("olmo_hybrid_none", "OlmoHybridForCausalLM", olmo | none, THETA)
  factors = {
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.6,
  }
  minimax = (
    mixtral
    | factors
    | {
      # A number of heads that is no power of two.
      "num_attention_heads": 6,
      "num_key_value_heads": 3,
      "block_size": 4,
      "num_hidden_layers": 4,
      "layer_types": [LINEAR, EXACT, LINEAR, LINEAR],
    }
  )
  others = {key: 2 * value for key, value in factors.items()}
  case(
    "minimax",
    "MiniMaxForCausalLM",
    minimax,
    {"sliding_window": 3, "hidden_act": "silu", "rms_norm_eps": 0.3, **others},
    gain=1.0,
  )
  kimi = DECODER | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": [LINEAR, EXACT, LINEAR, EXACT],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_head_dim": 6,
    "linear_num_heads": 3,
    "kv_lora_rank": 9,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
    "moe_intermediate_size": 5,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
  }
  del kimi["head_dim"]
  case(
    "kimi_linear",
    "KimiLinearForCausalLM",
    kimi | {"attention_bias": True, "q_lora_rank": 11},
    {
      "routed_scaling_factor": 0.9,
      "num_experts_per_token": 2,
      "moe_renormalize": False,
      "topk_group": 3,
      "rms_norm_eps": 0.3,
    },
  )
  others = {"tie_word_embeddings": True, "norm_topk_prob": False}
  case(
    "kimi_linear_plain",
    "KimiLinearForCausalLM",
    kimi | others,
    {"moe_renormalize": True},
  )
  kind = "Qwen3_5ForConditionalGeneration"
  images = QWEN_IMAGES | {"out_hidden_size": qwen3_5["hidden_size"]}
  text = qwen3_5 | {"tie_word_embeddings": False}
  multimodal("qwen3_5", kind, text, images)
  kind = "Qwen3_5MoeForConditionalGeneration"
  text = recurrent | experts | {"tie_word_embeddings": True}
  multimodal("qwen3_5_moe", kind, text, images)
  text = CASES["minimax_m3_text"][1] | {"tie_word_embeddings": False}
  kind = "MiniMaxM3SparseForConditionalGeneration"
  width = {"projector_hidden_size": 6}
  multimodal("minimax_m3", kind, text, MINIMAX_IMAGES, **width)


if __name__ == "__main__":
  main()
