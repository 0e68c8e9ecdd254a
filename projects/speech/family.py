"""Wav2Vec2-Conformer: Wang et al., arXiv:2010.05171 (fairseq S2T)."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from models.published import family
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from projects.speech.config import (
  ConformerConfig,
  ExtractorConfig,
)

_PREFIX = "wav2vec2_conformer"

_CONVOLUTION = Layout(
  lambda x, n: [np.transpose(x, (2, 1, 0))],
  lambda xs: np.transpose(xs[0], (2, 1, 0)),
)
"""PyTorch's convolution is `[out, in, size]`."""

_POINTWISE = Layout(lambda x, n: [x[..., 0].T], lambda xs: xs[0].T[..., None])
"""`[out, in, 1]`."""

_DEPTHWISE = Layout(lambda x, n: [x[:, 0].T], lambda xs: xs[0].T[:, None])
"""`[features, 1, size]`."""

_POSITIONS: dict[str | None, Any] = {
  "relative": "transformer_xl",
  "rotary": "rotary_inputs",
  None: "none",
}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names, head
  # Norms in a layer use 1e-5 for any value in the config.
  family.only(hf_config, add_adapter=False, layer_norm_eps=1e-5)
  position = hf_config.get("position_embeddings_type", "relative")
  if not isinstance(position, str | None) or position not in _POSITIONS:
    raise ValueError(
      "position_embeddings_type: expected 'relative', 'rotary' or null, got "
      f"{position!r}"
    )
  widths = family.sizes(hf_config, "conv_dim", [512] * 7)
  family.only(hf_config, num_feat_extract_layers=len(widths))
  config = ConformerConfig(
    num_layers=family.size(hf_config, "num_hidden_layers", 12),
    num_heads=family.size(hf_config, "num_attention_heads", 12),
    features=family.size(hf_config, "hidden_size", 768),
    mlp_features=family.size(hf_config, "intermediate_size", 3072),
    kernel_size=family.size(hf_config, "conv_depthwise_kernel_size", 31),
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    position=_POSITIONS[position],
    rotary_theta=family.number(hf_config, "rotary_embedding_base", 10000.0),
    mask_convolution=False,
    extractor=ExtractorConfig(
      features=widths,
      kernel_sizes=family.sizes(
        hf_config, "conv_kernel", [10, 3, 3, 3, 3, 2, 2]
      ),
      strides=family.sizes(hf_config, "conv_stride", [5, 2, 2, 2, 2, 2, 2]),
      norm=family.choice(
        hf_config, "feat_extract_norm", ("group", "layer"), "group"
      ),
      use_bias=family.flag(hf_config, "conv_bias", False),
      activation=family.activation(
        hf_config, "feat_extract_activation", "gelu"
      ),
    ),
    dropout_rate=family.number(hf_config, "hidden_dropout", 0.1),
  )
  vocab_size = family.size(hf_config, "vocab_size")
  length = family.size(hf_config, "max_source_positions", 5000)
  return Description(config, vocab_size, vocab_size, length)


def kept(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Implements `Family.kept`: tensors of wav2vec 2.0's pretraining, and counters."""
  features = family.size(hf_config, "hidden_size", 768)
  taps = family.size(hf_config, "num_conv_pos_embeddings", 128)
  groups = family.size(hf_config, "num_conv_pos_embedding_groups", 16)
  encoder = f"{_PREFIX}.encoder"
  convolution = f"{encoder}.pos_conv_embed.conv"
  shapes: dict[str, tuple[int, ...]] = {
    # transformers creates this convolution, with weight norm, but never uses it.
    f"{convolution}.bias": (features,),
    f"{convolution}.parametrizations.weight.original0": (1, 1, taps),
    f"{convolution}.parametrizations.weight.original1": (
      features,
      features // groups,
      taps,
    ),
  }
  for i in range(family.size(hf_config, "num_hidden_layers", 12)):
    norm = f"{encoder}.layers.{i}.conv_module.batch_norm"
    shapes[f"{norm}.num_batches_tracked"] = ()
  masks = ("mask_time_prob", 0.05), ("mask_feature_prob", 0.0)
  if any(family.number(hf_config, *rate) > 0 for rate in masks):
    shapes[f"{_PREFIX}.masked_spec_embed"] = (features,)
  if hf_config.get("position_embeddings_type", "relative") == "rotary":
    heads = family.size(hf_config, "num_attention_heads", 12)
    frequencies = -(-(features // heads) // 2)
    shapes[f"{encoder}.embed_positions.inv_freq"] = (frequencies,)
  return shapes


def rows(config: ConformerConfig) -> list[Row]:
  """Implements `Family.rows`."""
  front = f"{_PREFIX}.feature_extractor.conv_layers"
  convolutions = []
  # Only rows of the layers of a Transformer are repeated automatically.
  for i in range(len(config.extractor.features) if config.extractor else 0):
    ours = f"front/convolution_{i}"
    convolutions += [
      Row(f"{front}.{i}.conv.weight", (f"params/{ours}/kernel",), _CONVOLUTION),
      Row(f"{front}.{i}.conv.bias", (f"params/{ours}/bias",)),
      *family.norm(f"{front}.{i}.layer_norm", f"front/norm_{i}"),
    ]
  projection, encoder = f"{_PREFIX}.feature_projection", f"{_PREFIX}.encoder"
  return [
    *convolutions,
    *family.norm(f"{projection}.layer_norm", "front/norm"),
    *family.linear(f"{projection}.projection", "front/projection"),
    *_layer_rows(f"{encoder}.layers.{{i}}", "encoder_{i}"),
    *family.norm(f"{encoder}.layer_norm", "encoder_norm"),
    *family.linear("lm_head", "symbols"),
  ]


def _layer_rows(theirs: str, ours: str) -> list[Row]:
  attention, module = f"{theirs}.self_attn", f"{ours}/self_attention"
  convolution = f"{theirs}.conv_module"

  def mlp(name: str, path: str) -> list[Row]:
    return [
      *family.norm(f"{theirs}.{name}_layer_norm", f"{path}_norm"),
      *family.linear(f"{theirs}.{name}.intermediate_dense", f"{path}/hidden"),
      *family.linear(f"{theirs}.{name}.output_dense", f"{path}/out"),
    ]

  return [
    *mlp("ffn1", f"{ours}/first_mlp"),
    *mlp("ffn2", f"{ours}/last_mlp"),
    *family.norm(f"{theirs}.self_attn_layer_norm", f"{module}_norm"),
    *family.linear(f"{attention}.linear_q", f"{module}/query"),
    *family.linear(f"{attention}.linear_k", f"{module}/key"),
    *family.linear(f"{attention}.linear_v", f"{module}/value"),
    *family.linear(f"{attention}.linear_out", f"{module}/out"),
    *family.linear(f"{attention}.linear_pos", f"{module}/position"),
    Row(f"{attention}.pos_bias_u", (f"params/{module}/key_bias",)),
    Row(f"{attention}.pos_bias_v", (f"params/{module}/position_bias",)),
    *family.norm(f"{convolution}.layer_norm", f"{ours}/convolution_norm"),
    Row(
      f"{convolution}.pointwise_conv1.weight",
      (f"params/{ours}/convolution/gated/kernel",),
      _POINTWISE,
    ),
    Row(
      f"{convolution}.depthwise_conv.weight",
      (f"params/{ours}/convolution/kernel",),
      _DEPTHWISE,
    ),
    *family.batch_norm(
      f"{convolution}.batch_norm", f"{ours}/convolution/batch_norm"
    ),
    Row(
      f"{convolution}.pointwise_conv2.weight",
      (f"params/{ours}/convolution/out/kernel",),
      _POINTWISE,
    ),
    *family.norm(f"{theirs}.final_layer_norm", f"{ours}/norm"),
  ]


WAV2VEC2_CONFORMER = Family(
  name="wav2vec2-conformer",
  architectures={"Wav2Vec2ConformerForCTC": "tokens"},
  describe=describe,
  rows=rows,
  # Names in files from PyTorch before 2.1.
  renamed=tuple(
    (f"conv.weight_{old}", f"conv.parametrizations.weight.original{new}")
    for old, new in (("g", 0), ("v", 1))
  ),
  inputs={"input_values": "audio", "attention_mask": "source_mask"},
  without_effect={
    **no_effect(
      "affects only training or another head",
      "activation_dropout apply_spec_augment conformer_conv_dropout "
      "contrastive_logits_temperature ctc_loss_reduction ctc_zero_infinity "
      "diversity_loss_weight feat_proj_dropout feat_quantizer_dropout "
      "final_dropout layerdrop mask_feature_length mask_feature_min_masks "
      "mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob "
      "num_negatives classifier_proj_size codevector_dim num_codevector_groups "
      "num_codevectors_per_group proj_codevector_dim tdnn_dilation tdnn_dim "
      "tdnn_kernel use_weighted_layer_sum xvector_output_dim",
    ),
    **no_effect(
      "belongs to an adapter, which no supported model has",
      "adapter_kernel_size adapter_stride num_adapter_layers output_hidden_size",
    ),
  },
  kept=kept,
)
"""Conformers over samples, with CTC."""
