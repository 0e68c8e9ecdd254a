"""Writes folders of plain decoders and encoders with transformers 5.

pip install torch==2.13.0 transformers==5.24.0
python tests/models/published/make_plain.py [FOLDER …]

They are as those of `make_fixtures.py`. One row is whole, one is padded on the right
and one on the left. Sizes differ from one another, and keys from their defaults.
`changes.json` has changes of `config.json` (null takes a key out), and `changes.npz`
the logits of each.
"""

import json
import pathlib
import shutil
import sys
import tempfile

from make_fixtures import HERE, case
import numpy as np
import torch
import transformers

VOCAB = 53
NEAR, EXACT = "sliding_attention", "full_attention"


def padded(seed, length, pad):
  """Returns three rows: whole, padded on the right, padded on the left."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(5, VOCAB, (3, length))
  mask = np.ones((3, length), np.int64)
  mask[1, -length // 3 :] = 0
  mask[2, : length // 4] = 0
  tokens[mask == 0] = pad
  return {"input_ids": tokens, "attention_mask": mask}


DECODER = {
  "vocab_size": VOCAB,
  "hidden_size": 24,
  "intermediate_size": 37,
  "num_hidden_layers": 3,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 40,
  "bos_token_id": 1,
  "eos_token_id": 1,
  "pad_token_id": 0,
  "rms_norm_eps": 1e-3,
}


def rotary(theta, **more):
  """Returns the rotary positions of all layers."""
  plain = {"rope_type": "default", "rope_theta": theta}
  return {"rope_parameters": plain | more}


LINEAR = {"rope_type": "linear", "factor": 2.5}
ENCODER = {
  "vocab_size": VOCAB,
  "hidden_size": 24,
  "intermediate_size": 37,
  "num_hidden_layers": 2,
  "num_attention_heads": 3,
  "max_position_embeddings": 40,
  "layer_norm_eps": 1e-3,
  "hidden_dropout_prob": 0.0,
}
DISTILBERT = {
  "vocab_size": VOCAB,
  "dim": 24,
  "hidden_dim": 37,
  "n_layers": 2,
  "n_heads": 3,
  "max_position_embeddings": 40,
}
ROBERTA = ENCODER | {"type_vocab_size": 1, "pad_token_id": 4}
DEBERTA = ENCODER | {
  "relative_attention": True,
  "position_biased_input": False,
  "pos_att_type": ["c2p", "p2c"],
}
CASES = {
  "gemma": (
    "GemmaForCausalLM",
    DECODER
    | rotary(70.0, **LINEAR)
    | {"head_dim": 10, "attention_bias": True, "hidden_act": "relu"},
  ),
  "gemma_untied": (
    "GemmaForCausalLM",
    DECODER
    | rotary(70.0)
    | {"head_dim": 6, "hidden_act": "silu", "tie_word_embeddings": False},
  ),
  "granite": (
    "GraniteForCausalLM",
    DECODER
    | rotary(70.0, **LINEAR)
    | {"head_dim": 10, "attention_bias": True, "mlp_bias": True}
    | {"hidden_act": "gelu", "tie_word_embeddings": True}
    | {"embedding_multiplier": 1.7, "attention_multiplier": 0.4}
    | {"residual_multiplier": 0.6, "logits_scaling": 2.5},
  ),
  "phi3": (
    "Phi3ForCausalLM",
    DECODER
    | rotary(70.0, partial_rotary_factor=0.5)
    | {"sliding_window": 5, "hidden_act": "gelu", "tie_word_embeddings": True},
  ),
  "starcoder2": (
    "Starcoder2ForCausalLM",
    {x: y for x, y in DECODER.items() if x != "rms_norm_eps"}
    | rotary(70.0, **LINEAR)
    | {"num_key_value_heads": 3, "head_dim": 10, "norm_epsilon": 1e-3}
    | {"sliding_window": 5, "hidden_act": "silu"},
  ),
  "starcoder2_no_bias": (
    "Starcoder2ForCausalLM",
    {x: y for x, y in DECODER.items() if x != "rms_norm_eps"}
    | rotary(70.0)
    | {"norm_epsilon": 1e-3, "use_bias": False, "tie_word_embeddings": False},
  ),
  "smollm3": (
    "SmolLM3ForCausalLM",
    DECODER
    | rotary(70.0, **LINEAR)
    | {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}
    | {"use_sliding_window": True, "sliding_window": 5}
    | {"layer_types": [EXACT, NEAR, NEAR, EXACT]}
    | {"head_dim": 10, "attention_bias": True, "mlp_bias": True}
    | {"hidden_act": "relu"},
  ),
  "cohere2": (
    "Cohere2ForCausalLM",
    {x: y for x, y in DECODER.items() if x != "rms_norm_eps"}
    | rotary(70.0, **LINEAR)
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_act": "gelu"}
    | {"layer_types": [NEAR, EXACT, EXACT, NEAR], "sliding_window": 5}
    | {"attention_bias": True, "layer_norm_eps": 1e-3, "logit_scale": 0.3},
  ),
  "opt": (
    "OPTForCausalLM",
    {
      "vocab_size": VOCAB,
      "hidden_size": 24,
      "ffn_dim": 37,
      "num_hidden_layers": 3,
      "num_attention_heads": 3,
      "max_position_embeddings": 40,
      "word_embed_proj_dim": 10,
      "do_layer_norm_before": False,
      "activation_function": "gelu",
      "dropout": 0.0,
    },
  ),
  "opt_before": (
    "OPTForCausalLM",
    {
      "vocab_size": VOCAB,
      "hidden_size": 20,
      "ffn_dim": 37,
      "num_hidden_layers": 2,
      "num_attention_heads": 5,
      "max_position_embeddings": 33,
      "enable_bias": False,
      "tie_word_embeddings": False,
    },
  ),
  "distilbert": ("DistilBertModel", DISTILBERT),
  "distilbert_masked": (
    "DistilBertForMaskedLM",
    DISTILBERT | {"activation": "relu", "dropout": 0.0},
  ),
  "distilbert_classes": (
    "DistilBertForSequenceClassification",
    DISTILBERT | {"num_labels": 5},
  ),
  "electra": ("ElectraModel", ENCODER | {"embedding_size": 24}),
  "electra_masked": (
    "ElectraForMaskedLM",
    ENCODER | {"embedding_size": 10, "hidden_act": "relu"},
  ),
  "electra_classes": (
    "ElectraForSequenceClassification",
    ENCODER | {"embedding_size": 30, "num_labels": 5},
  ),
  "deberta_v2": (
    "DebertaV2Model",
    DEBERTA
    | {"share_att_key": True, "position_buckets": 7, "hidden_act": "relu"}
    | {"max_relative_positions": 17, "norm_rel_ebd": "layer_norm"},
  ),
  "deberta_v2_masked": (
    "DebertaV2ForMaskedLM",
    DEBERTA
    | {"position_buckets": 8, "type_vocab_size": 3}
    | {"pos_att_type": ["p2c", "c2p"]},
  ),
  "deberta_v2_c2p": (
    "DebertaV2ForMaskedLM",
    DEBERTA
    | {"pos_att_type": "c2p", "max_relative_positions": 6}
    | {"norm_rel_ebd": "layer_norm"},
  ),
  "deberta_v2_p2c": (
    "DebertaV2Model",
    DEBERTA | {"pos_att_type": "p2c", "share_att_key": True},
  ),
  "deberta_v2_classes": (
    "DebertaV2ForSequenceClassification",
    ENCODER
    | {"num_labels": 5, "pooler_hidden_act": "relu", "pos_att_type": ["c2p"]},
  ),
  "xlm_roberta": ("XLMRobertaModel", ROBERTA | {"pad_token_id": 1}),
  "xlm_roberta_masked": ("XLMRobertaForMaskedLM", ROBERTA),
  "xlm_roberta_classes": (
    "XLMRobertaForSequenceClassification",
    ROBERTA | {"num_labels": 5},
  ),
}


# Keys whose values transformers reads without other tensors.
CHANGES = {
  "gemma": [
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.1},
    {"rope_parameters": None},
  ],
  "granite": [
    *({f"{x}_multiplier": None} for x in ("embedding", "residual")),
    {"attention_multiplier": None},
    {"logits_scaling": None},
    {"hidden_act": None},
  ],
  "phi3": [
    {"sliding_window": None},
    {"sliding_window": 9},
    {"rms_norm_eps": None},
    rotary(9.0, partial_rotary_factor=1.0),
  ],
  "starcoder2": [
    {"sliding_window": None},
    {"hidden_act": None},
    {"norm_epsilon": None},
  ],
  "smollm3": [
    {"no_rope_layers": None, "layer_types": None},
    {"no_rope_layers": None, "no_rope_layer_interval": 3},
    {"layer_types": None},
    {"use_sliding_window": False, "layer_types": None},
    {"rope_parameters": None},
  ],
  "cohere2": [
    {"layer_types": None},
    {"layer_types": None, "sliding_window_pattern": 2},
    {"layer_types": [EXACT] * 4},
    {"logit_scale": None},
    {"layer_norm_eps": None},
    {"rope_parameters": None},
  ],
  "opt": [{"activation_function": None}],
  "distilbert_masked": [{"activation": None}],
  "electra_masked": [{"hidden_act": None}, {"layer_norm_eps": 0.1}],
  "longformer": [{"attention_window": 400}],
  "deberta_v2": [
    {"max_relative_positions": 30},
    {"layer_norm_eps": None},
    {"pos_att_type": ["c2p"]},
    {"pos_att_type": "p2c | c2p", "hidden_act": None},
  ],
  "deberta_v2_classes": [{"pooler_hidden_act": "relu2"}],
  "deberta_v2_masked": [{"max_relative_positions": 9}],
  "xlm_roberta_masked": [{"layer_norm_eps": 0.1}, {"hidden_act": "relu"}],
  "xlm_roberta_classes": [{"hidden_act": "silu"}],
}


def change(folder, kind):
  """Writes the logits of a folder with each change of its `config.json`."""
  changes = CHANGES.get(folder.name, [])
  if not changes:
    return
  config = json.loads((folder / "config.json").read_text())
  with np.load(folder / "expected.npz") as arrays:
    inputs = {
      name.removeprefix("input."): torch.tensor(arrays[name])
      for name in arrays
      if name.startswith("input.")
    }
  logits = {}
  for number, values in enumerate(changes):
    with tempfile.TemporaryDirectory() as name:
      path = pathlib.Path(name)
      shutil.copy(folder / "model.safetensors", path)
      kept = {x: y for x, y in (config | values).items() if y is not None}
      (path / "config.json").write_text(json.dumps(kept))
      options = {"attn_implementation": "eager", "dtype": torch.float32}
      model = getattr(transformers, kind).from_pretrained(path, **options)
    with torch.no_grad():
      out = model.eval()(**inputs)
    out = out.logits if "logits" in out else out.last_hidden_state
    logits[str(number)] = out.numpy()
  np.savez_compressed(folder / "changes.npz", **logits)
  (folder / "changes.json").write_text(json.dumps(changes, indent=1) + "\n")


def main(chosen):
  """Makes the chosen folders, or all."""
  for number, (name, (kind, config)) in enumerate(CASES.items()):
    if name in chosen or not chosen:
      inputs = padded(number, 23, config.get("pad_token_id", 1))
      types = config.get("type_vocab_size", 2 * name.startswith("electra"))
      if types > 1:
        inputs["token_type_ids"] = inputs["input_ids"] % types
      if name == "deberta_v2_classes":
        # There, a padded first token attends to padding, and the classes read it.
        inputs["attention_mask"][2] = 1
      case(HERE / name, kind, config, inputs)
      change(HERE / name, kind)
  if "longformer" in chosen or not chosen:  # A folder of `make_fixtures.py`.
    change(HERE / "longformer", "LongformerForMaskedLM")


if __name__ == "__main__":
  main(sys.argv[1:])
