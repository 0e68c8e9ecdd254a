"""Writes small published models with the logits of transformers.

    pip install torch==2.13.0 transformers==4.57.6
    python tests/models/published/make_fixtures.py

Mamba-2 is of 5.23.0, as 4.57.6 norms all groups of heads together, which its authors'
code does not. Most decoders are in `make_versions.py`.

Models of a project are in a file of the same name beside its own folders. Writes a
folder for each case: what `save_pretrained` of transformers writes, and
`expected.npz` with inputs and outputs in float32 and, where transformers stays
in it, float64. Weights are drawn wide, since with transformers' own 0.02 the
attention is uniform and hides most mistakes. The tests read these folders and
need neither of the two libraries.
"""

import json
import math
import pathlib
import shutil

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB = 61
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def draw(model: torch.nn.Module, seed: int, gain: float) -> None:
  """Kernels of gain/√fan-in, norms 1 ± 0.2, biases ± 0.2, tables ± 0.5."""
  generator = torch.Generator().manual_seed(seed)
  for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=generator)
    lower = name.lower()
    if "norm" in lower or ".ln_" in lower or "layer_norm" in lower:
      # Some scales are what they have beyond 1; a norm before a gate has all.
      from_one = type(model).__name__.startswith(
        ("Gemma", "Qwen3Next", "Qwen3_5")
      )
      from_one &= not name.endswith("linear_attn.norm.weight")
      base = 1.0 if name.endswith("weight") and not from_one else 0.0
      value = 0.2 * noise + base
    elif name.endswith("linear_attn.A_log"):
      value = torch.empty_like(noise).uniform_(1, 16, generator=generator).log()
    elif name.endswith("linear_attn.dt_bias"):
      # Steps of 0.001 to 0.1, so that a state lasts for many positions.
      low, high = math.log(0.001), math.log(0.1)
      step = torch.empty_like(noise).uniform_(low, high, generator=generator)
      value = step.exp().expm1().log()
    elif weight.ndim == 1:
      value = 0.2 * noise
    elif any(
      x in lower for x in ("token", "latents", "position_embeddings")
    ) or (
      "patch_embeddings" not in lower
      and any(x in lower for x in ("embed", "shared", "wte", "wpe"))
    ):
      value = 0.5 * noise
    elif "relative_attention_bias" in lower:
      value = noise
    else:
      is_transposed = "Conv1D" in _kind(model, name)
      fan_in = weight.shape[0] if is_transposed else weight[0].numel()
      value = gain * noise / fan_in**0.5
    with torch.no_grad():
      weight.copy_(value)
  for name, buffer in model.named_buffers():
    if name.endswith(("running_mean", "running_var")):
      noise = 0.5 * torch.randn(buffer.shape, generator=generator)
      buffer.copy_(noise.exp() if name.endswith("var") else noise)


def _kind(model, name):
  return type(model.get_submodule(name.rpartition(".")[0])).__name__


def ids(rng, batch, length, pad=None, lengths=()):
  """Draws tokens [B, T] and their mask, with padding at the ends of rows."""
  tokens = rng.integers(5, VOCAB, (batch, length))
  mask = np.ones((batch, length), np.int64)
  for row, kept in enumerate(lengths):
    mask[row, kept:] = 0
    if pad is not None:
      tokens[row, kept:] = pad
  return tokens, mask


def tokens_of(rng, batch, length, pad, lengths):
  """Returns `ids` as arguments of a call."""
  tokens, mask = ids(rng, batch, length, pad, lengths)
  return {"input_ids": tokens, "attention_mask": mask}


def channels_first(name, value):
  """Converts images to the layout of PyTorch."""
  tensor = torch.tensor(value)
  return tensor.permute(0, 3, 1, 2) if name == "pixel_values" else tensor


def case(path, kind, config, inputs, *, float64=False, gain=1.5, others=None):
  """Writes one folder.

  Args:
    path: of the folder, whose name decides what is drawn.
    kind: a class of transformers.
    config: of the model, by name.
    inputs: of a call.
    float64: whether logits in it are written, too.
    gain: of the kernels.
    others: images of another size.
  """
  shutil.rmtree(path, ignore_errors=True)
  made = getattr(transformers, kind)
  model = made(made.config_class(**config))
  draw(model, len(path.name), gain)
  model.eval()
  # Half the bytes in the repository; what is expected has these weights as float32.
  # Frequencies are written, too, and no reader of them rounds.
  exact = {x: b for x, b in model.named_buffers() if x.endswith("inv_freq")}
  model.bfloat16()
  for name, buffer in exact.items():
    model.get_submodule(name.rpartition(".")[0]).inv_freq = buffer
  model.save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  arrays = {f"input.{key}": value for key, value in inputs.items()}
  tensors = {key: channels_first(key, value) for key, value in inputs.items()}
  for dtype in ("float32", "float64") if float64 else ("float32",):
    options = {"attn_implementation": "eager", "torch_dtype": DTYPES[dtype]}
    loaded = made.from_pretrained(path, **options).eval()
    with torch.no_grad():
      out = loaded(**tensors)
    out = out.logits if "logits" in out else out.last_hidden_state
    arrays[dtype] = out.numpy()
    if others is not None and dtype == "float32":
      larger = channels_first("pixel_values", others)
      with torch.no_grad():
        out = loaded(larger, interpolate_pos_encoding=True)
      arrays |= {"others": others, "of_others": out.logits.numpy()}
  np.savez_compressed(path / "expected.npz", **arrays)
  size = sum(file.stat().st_size for file in path.iterdir())
  print(f"{path.name:32s} {size / 1024:7.0f} KiB", flush=True)


def of_recurrences():
  """Makes Mamba-2 and Qwen3-Next, which is without experts."""
  inputs = tokens_of(np.random.default_rng(37), 3, 19, None, (19, 12, 1))
  # Three heads of values for each head of queries and keys.
  mamba2 = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 8,
    "state_size": 10,
    "n_groups": 2,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 1,
  }
  case(HERE / "mamba2", "Mamba2ForCausalLM", mamba2, inputs, gain=1.0)
  tied = mamba2 | {
    "num_hidden_layers": 2,
    "num_heads": 9,
    "expand": 3,
    "n_groups": 1,
    "use_conv_bias": False,
    "tie_word_embeddings": True,
  }
  case(HERE / "mamba2_tied", "Mamba2ForCausalLM", tied, inputs, gain=1.0)
  inputs = tokens_of(np.random.default_rng(41), 3, 19, None, (19, 12, 1))
  # Layers that differ in heads and widths.
  qwen3_next = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40,
    "rope_theta": 500.0,
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 5,
    "num_experts": 0,
  }
  case(HERE / "qwen3_next", "Qwen3NextForCausalLM", qwen3_next, inputs)


def of_modernbert():
  """Makes ModernBERT: logits of tokens by version 4, of classes by version 5."""
  inputs = tokens_of(np.random.default_rng(43), 3, 33, 0, (33, 20, 2))
  shape = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "norm_eps": 1e-3,
    "local_attention": 8,
    **{f"{x}_token_id": 0 for x in ("pad", "bos", "eos", "cls", "sep")},
  }
  if transformers.__version__.startswith("4."):
    of_tokens = shape | {
      "hidden_activation": "gelu_new",
      "global_attn_every_n_layers": 2,
      "global_rope_theta": 700.0,
      "local_rope_theta": 30.0,
      "attention_bias": True,
      "norm_bias": True,
      "classifier_bias": True,
      "classifier_activation": "silu",
      "tie_word_embeddings": False,
      "reference_compile": False,
    }
    kind = "ModernBertForMaskedLM"
    return case(HERE / "modernbert", kind, of_tokens, inputs)
  near, exact = "sliding_attention", "full_attention"
  of_classes = shape | {
    "layer_types": [near, near, exact, near],
    "rope_parameters": {
      near: {"rope_type": "default", "rope_theta": 30.0},
      exact: {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
    },
    "mlp_bias": True,
    "classifier_pooling": "mean",
    "classifier_activation": "relu",
    "num_labels": 5,
  }
  kind = "ModernBertForSequenceClassification"
  return case(HERE / "modernbert_classes", kind, of_classes, inputs)


SHAPE = {
  "vocab_size": VOCAB,
  "hidden_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 37,
  "max_position_embeddings": 40,
  "type_vocab_size": 2,
  "pad_token_id": 0,
}


def main():
  """Makes all of them."""
  of_recurrences()
  of_modernbert()
  rng = np.random.default_rng(0)
  inputs = tokens_of(rng, 3, 17, 0, (17, 11, 1))
  types = (np.arange(17)[None, :] > np.array([[5], [9], [0]])).astype(np.int64)
  inputs["token_type_ids"] = types
  case(HERE / "bert", "BertModel", SHAPE, inputs, float64=True)
  case(HERE / "bert_masked", "BertForMaskedLM", SHAPE, inputs, float64=True)
  bert = SHAPE | {"num_labels": 3, "hidden_act": "relu"}
  case(HERE / "bert_classes", "BertForSequenceClassification", bert, inputs)

  of_roberta = SHAPE | {"type_vocab_size": 1, "pad_token_id": 1}
  inputs = tokens_of(rng, 3, 17, 1, (17, 11, 2))
  roberta = of_roberta | {"layer_norm_eps": 1e-5}
  case(HERE / "roberta", "RobertaForMaskedLM", roberta, inputs, float64=True)

  gpt2 = {"vocab_size": VOCAB, "n_positions": 40}
  gpt2 |= {"n_embd": 24, "n_layer": 3, "n_head": 3}
  inputs = tokens_of(rng, 3, 19, None, (19, 12, 1))
  case(HERE / "gpt2", "GPT2LMHeadModel", gpt2, inputs, float64=True)

  inputs = tokens_of(rng, 2, 150, 0, (150, 97))
  inputs["decoder_input_ids"], _ = ids(rng, 2, 143)
  t5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "decoder_start_token_id": 0,
  }
  kind = "T5ForConditionalGeneration"
  # Its logits are not scaled. With 1.5 rounding alone changes 5e-5 of them.
  case(HERE / "t5", kind, t5, inputs, gain=1.0)
  t5 |= {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}
  t5 |= {"layer_norm_epsilon": 1e-3, "relative_attention_num_buckets": 12}
  t5 |= {"relative_attention_max_distance": 40}
  case(HERE / "t5_v1_1", kind, t5, inputs, gain=1.0)

  llama = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "attention_bias": True,
  }
  inputs = tokens_of(rng, 3, 33, None, (33, 20, 1))
  case(HERE / "llama", "LlamaForCausalLM", llama, inputs)

  longformer = of_roberta | {
    "max_position_embeddings": 80,
    "attention_window": [4, 8, 4],
    "layer_norm_eps": 1e-3,
  }
  inputs = tokens_of(rng, 2, 53, 1, (53, 40))
  everyone = np.zeros_like(inputs["attention_mask"])
  everyone[0, [0, 7]] = everyone[1, 0] = 1
  inputs["global_attention_mask"] = everyone
  case(HERE / "longformer", "LongformerForMaskedLM", longformer, inputs)

  nystromformer = SHAPE | {
    "num_landmarks": 8,
    "segment_means_seq_len": 32,
    "conv_kernel_size": 5,
  }
  inputs = {"input_ids": ids(rng, 2, 32)[0]}
  kind = "NystromformerForMaskedLM"
  case(HERE / "nystromformer", kind, nystromformer, inputs)
  about = {"torch": torch.__version__, "transformers": transformers.__version__}
  (HERE / "made_by.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
  main()
