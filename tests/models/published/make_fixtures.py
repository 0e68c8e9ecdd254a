"""Makes small published models, and the logits that transformers gives them.

    pip install torch==2.13.0 transformers==4.57.6
    python tests/models/published/make_fixtures.py

Mamba-2 is of 5.23.0, as 4.57.6 norms all groups of heads together, which its authors'
code does not. Most decoders are in `make_versions.py`.

Writes a folder for each case: what `save_pretrained` of transformers writes, and
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
      from_one = type(model).__name__.startswith(("Gemma", "Qwen3Next"))
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
    elif (
      "token" in lower
      or "latents" in lower
      or "position_embeddings" in lower
      or (
        "patch_embeddings" not in lower
        and (
          "embed" in lower
          or "shared" in lower
          or "wte" in lower
          or "wpe" in lower
        )
      )
    ):
      value = 0.5 * noise
    elif "relative_attention_bias" in lower:
      value = noise
    else:
      fan_in = (
        weight.shape[0]
        if "Conv1D" in _kind(model, name)
        else (weight[0].numel())
      )
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
  """Random tokens [B, T] and their mask, the ends of rows padded."""
  tokens = rng.integers(5, VOCAB, (batch, length))
  mask = np.ones((batch, length), np.int64)
  for row, kept in enumerate(lengths):
    mask[row, kept:] = 0
    if pad is not None:
      tokens[row, kept:] = pad
  return tokens, mask


def channels_first(name, value):
  """What PyTorch reads."""
  tensor = torch.tensor(value)
  return tensor.permute(0, 3, 1, 2) if name == "pixel_values" else tensor


def case(name, model, inputs, float64=False, gain=1.5, others=None):
  """Writes one folder; `others` are images of another size."""
  folder = HERE / name
  shutil.rmtree(folder, ignore_errors=True)
  draw(model, len(name), gain)
  model.eval()
  # Half the bytes in the repository; what is expected has these weights as float32.
  model.bfloat16().save_pretrained(folder)
  for extra in ("generation_config.json",):
    (folder / extra).unlink(missing_ok=True)
  arrays = {f"input.{key}": value for key, value in inputs.items()}
  for dtype in ("float32", "float64") if float64 else ("float32",):
    loaded = (
      type(model)
      .from_pretrained(
        folder, attn_implementation="eager", torch_dtype=DTYPES[dtype]
      )
      .eval()
    )
    tensors = {key: channels_first(key, value) for key, value in inputs.items()}
    with torch.no_grad():
      out = loaded(**tensors)
    arrays[dtype] = (
      out.logits if "logits" in out else out.last_hidden_state
    ).numpy()
    if others is not None and dtype == "float32":
      with torch.no_grad():
        out = loaded(
          channels_first("pixel_values", others), interpolate_pos_encoding=True
        )
      arrays |= {"others": others, "of_others": out.logits.numpy()}
  np.savez_compressed(folder / "expected.npz", **arrays)
  size = sum(path.stat().st_size for path in folder.iterdir())
  print(f"{name:24s} {size / 1024:7.0f} KiB", flush=True)


def of_images():
  """Makes the models of images; `pixel_values` are stored as `[B, H, W, C]`."""
  shape = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 15,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 5,
  }
  rng = np.random.default_rng(17)
  images = {"pixel_values": rng.standard_normal((3, 15, 15, 3), np.float32)}
  # Of another size, where positions are interpolated: grown and shrunk.
  others = rng.standard_normal((2, 23, 8, 3), np.float32)
  case(
    "vit",
    transformers.ViTForImageClassification(transformers.ViTConfig(**shape)),
    images,
    others=others,
  )
  case(
    "deit",
    transformers.DeiTForImageClassificationWithTeacher(
      transformers.DeiTConfig(**shape)
    ),
    images,
    others=others,
  )


def of_stages():
  """Makes the models of images whose tokens get fewer from stage to stage."""
  rng = np.random.default_rng(19)
  shape = {"num_channels": 3, "num_labels": 5}
  case(
    "swin",
    transformers.SwinForImageClassification(
      transformers.SwinConfig(
        **shape,
        image_size=24,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=3,
        mlp_ratio=2.0,
      )
    ),
    {"pixel_values": rng.standard_normal((2, 24, 24, 3), np.float32)},
  )
  # Grids of 8 × 10, 4 × 5 and 2 × 3: sides that the stride does not divide.
  case(
    "cvt",
    transformers.CvtForImageClassification(
      transformers.CvtConfig(
        **shape,
        embed_dim=[8, 12, 16],
        num_heads=[1, 3, 2],
        depth=[1, 2, 3],
        mlp_ratio=[2.0, 2.0, 2.0],
      )
    ),
    {"pixel_values": rng.standard_normal((3, 31, 38, 3), np.float32)},
  )


def of_latents():
  """Makes Perceivers, which answer for every position that there may be."""
  sizes = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
    "num_latents": 6,
    "d_latents": 24,
    "d_model": 16,
    "num_blocks": 2,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 2,
    "self_attention_widening_factor": 2,
    # Is not read: every norm has 1e-5.
    "layer_norm_eps": 0.1,
  }
  rng = np.random.default_rng(19)
  tokens, mask = ids(rng, 3, 40, 0, (40, 23, 1))
  inputs = {"input_ids": tokens, "attention_mask": mask}
  perceiver = transformers.PerceiverConfig(**sizes)
  case(
    "perceiver",
    transformers.PerceiverForMaskedLM(perceiver),
    inputs,
    float64=True,
  )
  perceiver = transformers.PerceiverConfig(
    **sizes,
    qk_channels=12,
    v_channels=24,
    use_query_residual=False,
    cross_attention_widening_factor=3,
    hidden_act="relu",
  )
  case("perceiver_widths", transformers.PerceiverForMaskedLM(perceiver), inputs)


def of_speech():
  """Makes the models of speech, with padding and without."""
  shape = {
    "vocab_size": 13,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "conv_dim": (8, 12, 10),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "conv_depthwise_kernel_size": 7,
  }
  rng = np.random.default_rng(23)
  audio = {"input_values": rng.standard_normal((3, 611), np.float32)}
  mask = np.ones((3, 611), np.int64)
  mask[1, 397:], mask[2, 61:] = 0, 0
  for name, inputs, choices in (
    # As in the published folders.
    (
      "wav2vec2_conformer_relative",
      audio | {"attention_mask": mask},
      {
        "position_embeddings_type": "relative",
        "feat_extract_norm": "layer",
        "conv_bias": True,
        "hidden_act": "swish",
      },
    ),
    (
      "wav2vec2_conformer_rotary",
      audio | {"attention_mask": mask},
      {"position_embeddings_type": "rotary", "rotary_embedding_base": 500},
    ),
    (
      "wav2vec2_conformer_no_positions",
      audio,
      {"position_embeddings_type": None, "mask_time_prob": 0.0},
    ),
  ):
    config = transformers.Wav2Vec2ConformerConfig(**shape, **choices)
    case(name, transformers.Wav2Vec2ConformerForCTC(config), inputs)


def of_mamba2():
  """Makes Mamba-2: three heads of values for each head of queries and keys."""
  rng = np.random.default_rng(37)
  tokens, mask = ids(rng, 3, 19, None, (19, 12, 1))
  mamba2 = transformers.Mamba2Config(
    vocab_size=VOCAB,
    hidden_size=24,
    num_hidden_layers=3,
    num_heads=6,
    head_dim=8,
    state_size=10,
    n_groups=2,
    chunk_size=8,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=1,
  )
  case(
    "mamba2",
    transformers.Mamba2ForCausalLM(mamba2),
    {"input_ids": tokens, "attention_mask": mask},
    gain=1.0,
  )


def of_qwen3_next():
  """Makes Qwen3-Next without experts: layers that differ in heads and widths."""
  rng = np.random.default_rng(41)
  tokens, mask = ids(rng, 3, 19, None, (19, 12, 1))
  qwen3_next = transformers.Qwen3NextConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=37,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=40,
    rope_theta=500.0,
    attention_bias=True,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=10,
    linear_value_head_dim=5,
    num_experts=0,
  )
  case(
    "qwen3_next",
    transformers.Qwen3NextForCausalLM(qwen3_next),
    {"input_ids": tokens, "attention_mask": mask},
  )


def of_modernbert():
  """Makes ModernBERT: logits of tokens by version 4, of classes by version 5."""
  rng = np.random.default_rng(43)
  tokens, mask = ids(rng, 3, 33, 0, (33, 20, 2))
  shape = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "norm_eps": 1e-3,
    "local_attention": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
  }
  inputs = {"input_ids": tokens, "attention_mask": mask}
  if transformers.__version__.startswith("4."):
    modernbert = transformers.ModernBertConfig(
      **shape,
      hidden_activation="gelu_new",
      global_attn_every_n_layers=2,
      global_rope_theta=700.0,
      local_rope_theta=30.0,
      attention_bias=True,
      norm_bias=True,
      classifier_bias=True,
      classifier_activation="silu",
      tie_word_embeddings=False,
      reference_compile=False,
    )
    model = transformers.ModernBertForMaskedLM(modernbert)
    return case("modernbert", model, inputs)
  near, exact = "sliding_attention", "full_attention"
  modernbert = transformers.ModernBertConfig(
    **shape,
    layer_types=[near, near, exact, near],
    rope_parameters={
      near: {"rope_type": "default", "rope_theta": 30.0},
      exact: {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
    },
    mlp_bias=True,
    classifier_pooling="mean",
    classifier_activation="relu",
    num_labels=5,
  )
  model = transformers.ModernBertForSequenceClassification(modernbert)
  return case("modernbert_classes", model, inputs)


def main():
  """Makes all of them."""
  of_mamba2()
  of_qwen3_next()
  of_modernbert()
  rng = np.random.default_rng(0)
  shape = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 0,
  }
  bert = transformers.BertConfig(**shape)
  tokens, mask = ids(rng, 3, 17, 0, (17, 11, 1))
  types = (np.arange(17)[None, :] > np.array([[5], [9], [0]])).astype(np.int64)
  of_bert = {
    "input_ids": tokens,
    "attention_mask": mask,
    "token_type_ids": types,
  }
  case("bert", transformers.BertModel(bert), of_bert, float64=True)
  case("bert_masked", transformers.BertForMaskedLM(bert), of_bert, float64=True)
  bert = transformers.BertConfig(**shape, num_labels=3, hidden_act="relu")
  case(
    "bert_classes", transformers.BertForSequenceClassification(bert), of_bert
  )

  of_roberta = shape | {"type_vocab_size": 1, "pad_token_id": 1}
  tokens, mask = ids(rng, 3, 17, 1, (17, 11, 2))
  roberta = transformers.RobertaConfig(**of_roberta, layer_norm_eps=1e-5)
  case(
    "roberta",
    transformers.RobertaForMaskedLM(roberta),
    {"input_ids": tokens, "attention_mask": mask},
    float64=True,
  )

  gpt2 = transformers.GPT2Config(
    vocab_size=VOCAB, n_positions=40, n_embd=24, n_layer=3, n_head=3
  )
  tokens, mask = ids(rng, 3, 19, None, (19, 12, 1))
  of_gpt2 = {"input_ids": tokens, "attention_mask": mask}
  case("gpt2", transformers.GPT2LMHeadModel(gpt2), of_gpt2, float64=True)

  tokens, mask = ids(rng, 2, 150, 0, (150, 97))
  targets, _ = ids(rng, 2, 143)
  of_t5 = {
    "input_ids": tokens,
    "attention_mask": mask,
    "decoder_input_ids": targets,
  }
  sizes = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "decoder_start_token_id": 0,
  }
  t5 = transformers.T5Config(**sizes)
  # Its logits are not scaled. With 1.5 rounding alone changes 5e-5 of them.
  case("t5", transformers.T5ForConditionalGeneration(t5), of_t5, gain=1.0)
  t5 = transformers.T5Config(
    **sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False
  )
  case("t5_v1_1", transformers.T5ForConditionalGeneration(t5), of_t5, gain=1.0)

  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
  }
  tokens, mask = ids(rng, 3, 33, None, (33, 20, 1))
  of_llama = {"input_ids": tokens, "attention_mask": mask}
  case(
    "llama",
    transformers.LlamaForCausalLM(
      transformers.LlamaConfig(**sizes, rope_theta=500.0, attention_bias=True)
    ),
    of_llama,
  )
  of_longformer = of_roberta | {
    "max_position_embeddings": 80,
    "attention_window": [4, 8, 4],
  }
  tokens, mask = ids(rng, 2, 53, 1, (53, 40))
  everyone = np.zeros_like(mask)
  everyone[0, [0, 7]] = 1
  everyone[1, 0] = 1
  case(
    "longformer",
    transformers.LongformerForMaskedLM(
      transformers.LongformerConfig(**of_longformer)
    ),
    {
      "input_ids": tokens,
      "attention_mask": mask,
      "global_attention_mask": everyone,
    },
  )

  nystromformer = transformers.NystromformerConfig(
    **shape, num_landmarks=8, segment_means_seq_len=32, conv_kernel_size=5
  )
  tokens, _ = ids(rng, 2, 32)
  case(
    "nystromformer",
    transformers.NystromformerForMaskedLM(nystromformer),
    {"input_ids": tokens},
  )
  of_images()
  of_stages()
  of_latents()
  of_speech()
  about = {"torch": torch.__version__, "transformers": transformers.__version__}
  (HERE / "made_by.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
  main()
