"""Perceiver IO: Jaegle et al., arXiv:2107.14795."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family
from models.published.family import Description, Family, Row
from models.published.keys import no_effect
from projects.perceiver.config import PerceiverConfig

_OUTPUT_HEADS, _OUTPUT_QUERIES = 8, 8 * 32
"""Sizes of the outputs that `config.json` does not have."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: Any
) -> Description:
  """Implements `Family.describe`."""
  del names
  features = family.size(hf_config, "d_latents", 1280)
  inputs = family.size(hf_config, "d_model", 768)
  queries = _optional(hf_config, "qk_channels")
  values = _optional(hf_config, "v_channels") or queries
  if (values or features) != features:
    raise ValueError(
      f"v_channels: expected d_latents {features}, to which values are added, "
      f"got {values}"
    )
  shape_from = family.choice(
    hf_config, "cross_attention_shape_for_attention", ("kv", "q"), "kv"
  )
  across = queries or (inputs if shape_from == "kv" else features)
  widening = {
    name: family.size(hf_config, f"{name}_attention_widening_factor", 1)
    for name in ("self", "cross")
  }
  config = PerceiverConfig(
    num_latents=family.size(hf_config, "num_latents", 256),
    num_layers=family.size(hf_config, "num_self_attends_per_block", 26),
    num_blocks=family.size(hf_config, "num_blocks", 1),
    num_heads=family.size(hf_config, "num_self_attention_heads", 8),
    features=features,
    mlp_features=widening["self"] * features,
    query_features=queries,
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    input_features=inputs,
    input_heads=family.size(hf_config, "num_cross_attention_heads", 8),
    input_query_features=across,
    input_value_features=values or across,
    input_mlp_features=widening["cross"] * features,
    input_residual=family.flag(hf_config, "use_query_residual", True),
    output_heads=_OUTPUT_HEADS,
    output_query_features=_OUTPUT_QUERIES,
    output_residual=False,
    head=head,
  )
  vocab_size = family.size(hf_config, "vocab_size", 262)
  length = family.size(hf_config, "max_position_embeddings", 2048)
  return Description(config, vocab_size, vocab_size, length)


def _optional(hf_config: Mapping[str, Any], name: str) -> int | None:
  return None if hf_config.get(name) is None else family.size(hf_config, name)


def _layer(theirs: str, ours: str, module: str) -> list[Row]:
  """Returns the rows of one layer; in self-attention, keys have no separate norm."""
  attention = f"{theirs}.attention.self"
  return [
    *family.norm(f"{attention}.layernorm1", f"{ours}/{module}_norm"),
    *family.norm(f"{attention}.layernorm2", f"{ours}/memory_norm"),
    *family.linear(f"{attention}.query", f"{ours}/{module}/query"),
    *family.linear(f"{attention}.key", f"{ours}/{module}/key"),
    *family.linear(f"{attention}.value", f"{ours}/{module}/value"),
    *family.linear(f"{theirs}.attention.output.dense", f"{ours}/{module}/out"),
    *family.norm(f"{theirs}.layernorm", f"{ours}/mlp_norm"),
    *family.linear(f"{theirs}.mlp.dense1", f"{ours}/mlp/hidden"),
    *family.linear(f"{theirs}.mlp.dense2", f"{ours}/mlp/out"),
  ]


def _rows() -> list[Row]:
  inputs, encoder = "perceiver.input_preprocessor", "perceiver.encoder"
  decoder = "perceiver.decoder"
  return [
    Row("perceiver.embeddings.latents", ("params/latents",)),
    *family.table(f"{inputs}.embeddings", "embedding"),
    Row(f"{inputs}.position_embeddings.weight", ("params/positions",)),
    *_layer(f"{encoder}.cross_attention", "encoder", "cross_attention"),
    *_layer(f"{encoder}.self_attends.{{i}}", "encoder_{i}", "self_attention"),
    Row(
      f"{decoder}.output_position_encodings.position_embeddings",
      ("params/queries",),
    ),
    *_layer(
      f"{decoder}.decoding_cross_attention", "decoder", "cross_attention"
    ),
    Row("embedding_decoder.bias", ("params/head/bias",)),
  ]


PERCEIVER = Family(
  name="perceiver",
  architectures={"PerceiverForMaskedLM": "tokens"},
  describe=describe,
  rows=lambda config: _rows(),
  without_effect={
    **no_effect(
      "belongs to other modalities",
      "_label_trainable_num_channels audio_samples_per_frame image_size num_frames "
      "output_num_channels output_shape samples_per_patch train_size",
    ),
    **no_effect("is not read: every norm uses 1e-5", "layer_norm_eps"),
  },
  inputs={"input_ids": "source", "attention_mask": "source_mask"},
)
"""Models of bytes with latents, and one output for each possible position."""
