"""Writes configs for several versions of transformers, with their logits.

pip install torch==2.13.0 transformers==5.23.0  # And again with 4.57.6.
python tests/models/published/make_versions.py

Writes a folder for each family in `versions/`: the tensors, which all versions
write alike, `configs.json` with the `config.json` of each version and case, and
`expected.npz` with the logits, which versions have to agree on. A further version
adds its own configs and leaves the others. Keys are away from their defaults, since a default hides a key that is not
read.
"""

import json
import pathlib
import shutil

from make_fixtures import draw
import numpy as np
from safetensors.torch import load_file
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "versions"
VERSION = transformers.__version__
IS_4 = VERSION.startswith("4.")
SEQUENCE = np.random.default_rng(3).integers(5, 29, (2, 17))
MASK = np.arange(17)[None] < np.array([[17], [11]])
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 24,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}
# Files of some years ago call it `type`, and OLMo 2 reads no other.
OLD_LINEAR = {"type": "linear", "factor": 2.5} if IS_4 else LINEAR
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "beta_fast": 4.0,
  "original_max_position_embeddings": 10,
}
# With the temperature of DeepSeek, and a ramp that begins within the pairs.
SCALED_YARN = YARN | {
  "original_max_position_embeddings": 64,
  "mscale": 0.8,
  "mscale_all_dim": 0.3,
  "truncate": False,
}
NEAR, EXACT = "sliding_attention", "full_attention"


def turns(theta, scaling=None, near=None, share=None, keys=("rope_theta",)):
  """Returns the keys of rotary positions in a version's config.

  Args:
    theta: of all layers, or of those without a window.
    scaling: likewise.
    near: θ of the layers with a window, where these have a set of their own.
    share: of each head that is turned.
    keys: names in version 4 of θ, of the share, or of the other θ.
  """
  if IS_4:
    second = near if share is None else share
    old = dict(zip(keys, (theta, second), strict=False))
    return old | ({"rope_scaling": scaling} if scaling else {})
  exact = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
  if share is not None:
    exact["partial_rotary_factor"] = share
  local = {"rope_type": "default", "rope_theta": near}
  sets = exact if near is None else {EXACT: exact, NEAR: local}
  return {"rope_parameters": sets}


SIZES = {
  "vocab_size": 29,
  "hidden_size": 16,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 19,
  "max_position_embeddings": 40,
}
DECODER = SIZES | {
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-3,
  "bos_token_id": 1,
  "eos_token_id": 1,
  "pad_token_id": 0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
KINDS = [EXACT, NEAR, NEAR]
GEMMA = DECODER | {
  "head_dim": 6,
  "query_pre_attn_scalar": 7,
  "sliding_window": 5,
  "hidden_activation": "silu",
  "final_logit_softcapping": 3.0,
}
LLAMA = DECODER | {
  "head_dim": 6,
  "attention_bias": True,
  "mlp_bias": True,
  "hidden_act": "gelu",
}
BERT = SIZES | {"hidden_act": "relu", "layer_norm_eps": 1e-3, "pad_token_id": 0}
LOCAL = ("rope_theta", "rope_local_base_freq")
NEOX = ("rotary_emb_base", "rotary_pct")
# Family -> class, and case -> config.
CASES = {
  "llama": (
    "LlamaForCausalLM",
    {
      "plain": LLAMA | turns(70.0),
      "llama3": LLAMA | turns(700.0, LLAMA3),
      "linear": LLAMA | turns(70.0, LINEAR),
      "dynamic": LLAMA | turns(70.0, DYNAMIC),
      "yarn": LLAMA | turns(70.0, YARN),
      "scaled_yarn": LLAMA | turns(70.0, SCALED_YARN),
    },
  ),
  "mistral": (
    "MistralForCausalLM",
    {
      "window": DECODER
      | turns(70.0, LINEAR)
      | {"sliding_window": 5, "hidden_act": "gelu", "head_dim": 6}
    },
  ),
  "qwen2": (
    "Qwen2ForCausalLM",
    {
      "plain": DECODER | turns(70.0) | {"hidden_act": "gelu"},
      "last": DECODER | turns(70.0, YARN) | WINDOWS | {"max_window_layers": 1},
      "types": DECODER
      | turns(70.0)
      | WINDOWS
      | {"layer_types": [NEAR, EXACT, NEAR]},
    },
  ),
  "qwen3": (
    "Qwen3ForCausalLM",
    {
      "last": DECODER
      | turns(70.0, LLAMA3)
      | WINDOWS
      | {"max_window_layers": 2, "attention_bias": True, "head_dim": 6},
      "types": DECODER
      | turns(70.0)
      | WINDOWS
      | {"layer_types": [NEAR, EXACT, NEAR]}
      | {"attention_bias": True, "head_dim": 6, "hidden_act": "relu"},
    },
  ),
  "gemma2": (
    "Gemma2ForCausalLM",
    {
      "caps": GEMMA | turns(70.0, LINEAR) | {"attn_logit_softcapping": 2.0},
      "types": GEMMA
      | turns(70.0)
      | {"attn_logit_softcapping": None, "layer_types": KINDS},
    },
  ),
  "gemma3": (
    "Gemma3ForCausalLM",
    {
      "plain": GEMMA
      | turns(900.0, near=30.0, keys=LOCAL)
      | {"num_hidden_layers": 6, "attention_bias": True},
      "linear": GEMMA
      | turns(900.0, LINEAR, near=30.0, keys=LOCAL)
      | {"num_hidden_layers": 6, "layer_types": 2 * KINDS}
      | {"attention_bias": True},
    },
  ),
  "olmo2": (
    "Olmo2ForCausalLM",
    {
      "linear": DECODER
      | turns(70.0, OLD_LINEAR)
      | {"attention_bias": True, "hidden_act": "gelu"}
    },
  ),
  "olmo3": (
    "Olmo3ForCausalLM",
    {
      "yarn": DECODER
      | turns(70.0, YARN, near=70.0)
      | {"sliding_window": 5, "layer_types": KINDS}
      | {"attention_bias": True, "hidden_act": "gelu"}
    },
  ),
  "gpt_neox": (
    "GPTNeoXForCausalLM",
    {
      "plain": SIZES
      | turns(70.0, share=0.5, keys=NEOX)
      | {"layer_norm_eps": 1e-3, "use_parallel_residual": False},
      "yarn": SIZES | turns(70.0, YARN, share=1.0, keys=NEOX),
    },
  ),
  "gpt_neox_tied": (
    "GPTNeoXForCausalLM",
    {
      "plain": SIZES
      | turns(70.0, share=0.5, keys=NEOX)
      | {"attention_bias": False, "hidden_act": "relu"}
      | {"tie_word_embeddings": True}
    },
  ),
  "llama_tied": (
    "LlamaForCausalLM",
    {"plain": DECODER | turns(70.0) | {"tie_word_embeddings": True}},
  ),
  "gemma2_untied": (
    "Gemma2ForCausalLM",
    {
      "plain": GEMMA
      | turns(70.0)
      | {"attention_bias": True, "tie_word_embeddings": False}
    },
  ),
  "qwen3_next": (
    "Qwen3NextForCausalLM",
    {
      "half": DECODER
      | turns(
        70.0, LINEAR, share=0.5, keys=("rope_theta", "partial_rotary_factor")
      )
      | {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "num_experts": 0,
        "tie_word_embeddings": True,
      }
    },
  ),
  "gpt2": (
    "GPT2LMHeadModel",
    {
      "plain": {
        "vocab_size": 29,
        "n_positions": 40,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 19,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-3,
      }
    },
  ),
  "bert": ("BertForMaskedLM", {"plain": BERT}),
  "roberta": (
    "RobertaForMaskedLM",
    {"plain": BERT | {"hidden_act": "gelu", "pad_token_id": 3}},
  ),
}


def make(name, architecture, cases):
  """Adds what this version writes to the folder of a family."""
  folder = HERE / name
  folder.mkdir(parents=True, exist_ok=True)
  path, made = folder / "configs.json", folder / "made"
  kept = folder / "model.safetensors"
  configs = json.loads(path.read_text()) if path.exists() else {}
  arrays = {}
  if (folder / "expected.npz").exists():
    arrays = dict(np.load(folder / "expected.npz"))
  arrays |= {"input_ids": SEQUENCE, "attention_mask": MASK.astype(np.int64)}
  kind = getattr(transformers, architecture)
  for case, config in cases.items():
    theirs = kind.config_class(**config)
    theirs._attn_implementation = "eager"
    model = kind(theirs)
    draw(model, len(name), 1.5)
    if kept.exists():
      theirs.save_pretrained(made)
      shutil.copy(kept, made)
      model = kind.from_pretrained(made)
    model.bfloat16().save_pretrained(made)
    wide = torch.float32
    loaded = kind.from_pretrained(
      made, attn_implementation="eager", dtype=wide
    ).eval()
    inputs = {"input_ids": SEQUENCE, "attention_mask": arrays["attention_mask"]}
    with torch.no_grad():
      out = loaded(**{x: torch.tensor(y) for x, y in inputs.items()}).logits
    out = out.numpy()
    arrays.setdefault(case, out)
    configs[f"{VERSION} {case}"] = json.loads(
      (made / "config.json").read_text()
    )
    if not kept.exists():
      shutil.copy(made / kept.name, kept)
    before, after = load_file(kept), load_file(made / kept.name)
    same = {x: torch.equal(before[x], after[x]) for x in before | after}
    if not all(same.values()):
      raise ValueError(f"{name} {case}: {VERSION} writes other tensors")
    if np.abs(out - arrays[case]).max() > 1e-5 * np.abs(out).max():
      raise ValueError(f"{name} {case}: {VERSION} computes other logits")
    shutil.rmtree(made)
  lines = (
    f"{json.dumps(case)}: {json.dumps(config, sort_keys=True)}"
    for case, config in sorted(configs.items())
  )
  path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
  np.savez_compressed(folder / "expected.npz", **arrays)
  size = sum(one.stat().st_size for one in folder.iterdir())
  print(f"{name:12s} {size / 1024:5.0f} KiB", flush=True)


if __name__ == "__main__":
  for name, (architecture, cases) in CASES.items():
    make(name, architecture, cases)
