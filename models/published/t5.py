"""T5: Raffel et al., arXiv:1910.10683; versions 1.0 and 1.1."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.config import ModelConfig
from models.published import family
from models.published.family import Description, Family, Row

_ACTIVATIONS = {
  "relu": ("relu", False),
  "gated-gelu": ("gelu_tanh", True),
  "gated-silu": ("silu", True),
}
"""`feed_forward_proj` -> the activation, and whether it is gated."""

_LONGEST = 512


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; the head is tied if the file has no head."""
  feed_forward = family.choice(
    hf_config, "feed_forward_proj", _ACTIVATIONS, "relu"
  )
  activation, gated = _ACTIVATIONS[feed_forward]
  family.only(
    hf_config,
    "feed_forward_proj",
    dense_act_fn=family.their_activation(activation),
    is_gated_act=gated,
  )
  family.only(hf_config, is_encoder_decoder=True)
  # Version 5 always writes that the head is tied, and whether it is scaled.
  ties = family.flag(hf_config, "tie_word_embeddings", True)
  scales = family.flag(hf_config, "scale_decoder_outputs", ties)
  tied = "lm_head.weight" not in names
  if not tied and ties and "scale_decoder_outputs" not in hf_config:
    raise ValueError(
      "tie_word_embeddings: expected false with an lm_head.weight that differs "
      "from shared.weight, got true"
    )
  features = family.size(hf_config, "d_model")
  layers = family.size(hf_config, "num_layers")
  vocab_size = family.size(hf_config, "vocab_size")
  config = nested.make(
    ModelConfig,
    kind="encoder_decoder",
    num_layers=layers,
    num_decoder_layers=family.size(hf_config, "num_decoder_layers", layers),
    num_heads=family.size(hf_config, "num_heads"),
    head_dim=family.size(hf_config, "d_kv"),
    features=features,
    mlp_features=family.size(hf_config, "d_ff"),
    activation=activation,
    gated=gated,
    mlp_bias=False,
    attention_scale=1.0,
    dropout_rate=family.number(hf_config, "dropout_rate", 0.1),
    position="t5",
    relative_buckets=int(
      family.number(hf_config, "relative_attention_num_buckets", 32)
    ),
    relative_distance=int(
      family.number(hf_config, "relative_attention_max_distance", 128)
    ),
    norm="pre",
    norm_kind="rms",
    norm_epsilon=family.number(hf_config, "layer_norm_epsilon", 1e-6),
    embedding_scale=1.0,
    head=head,
    # T5 1.0 scales the inputs of its tied head.
    logit_scale=features**-0.5 if scales else 1.0,
    tie_embeddings=tied,
    tie_inputs=True,
  )
  length = family.size(hf_config, "n_positions", _LONGEST)
  return Description(config, vocab_size, vocab_size, length)


def _attention_rows(theirs: str, ours: str) -> list[Row]:
  names = {"q": "query", "k": "key", "v": "value", "o": "out"}
  return [
    Row(
      f"{theirs}.{old}.weight",
      (f"params/{ours}/{new}/kernel",),
      family.TRANSPOSED,
    )
    for old, new in names.items()
  ]


def _layer_rows(config: ModelConfig, stack: str) -> list[Row]:
  block, ours = f"{stack}.block.{{i}}.layer", f"{stack}_{{i}}"
  rows = [
    *_attention_rows(f"{block}.0.SelfAttention", f"{ours}/self_attention"),
    *family.norm(f"{block}.0.layer_norm", f"{ours}/self_attention_norm"),
  ]
  last = 1
  if stack == "decoder":
    last = 2
    rows += [
      *_attention_rows(f"{block}.1.EncDecAttention", f"{ours}/cross_attention"),
      *family.norm(f"{block}.1.layer_norm", f"{ours}/cross_attention_norm"),
    ]
  mlp = f"{block}.{last}.DenseReluDense"
  if config.gated:
    rows += family.linear(f"{mlp}.wi_0", f"{ours}/mlp/gate")
    rows += family.linear(f"{mlp}.wi_1", f"{ours}/mlp/hidden")
  else:
    rows += family.linear(f"{mlp}.wi", f"{ours}/mlp/hidden")
  rows += family.linear(f"{mlp}.wo", f"{ours}/mlp/out")
  return [*rows, *family.norm(f"{block}.{last}.layer_norm", f"{ours}/mlp_norm")]


def _rows(config: ModelConfig) -> list[Row]:
  rows = family.table("shared", "target_embedding")
  for stack in ("encoder", "decoder"):
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    rows += [
      Row(f"{bias}.weight", (f"params/{stack}_relative_bias",)),
      *_layer_rows(config, stack),
      *family.norm(f"{stack}.final_layer_norm", f"{stack}_norm"),
    ]
  return rows + family.table("lm_head", "output_embedding")


T5 = Family(
  name="t5",
  architectures={"T5ForConditionalGeneration": "tokens"},
  describe=describe,
  rows=_rows,
  copies=(
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("lm_head.weight", "shared.weight"),
  ),
  unread=(
    # Old files have one for cross-attention, which no model uses.
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
  ),
)
"""Encoder-decoders with relative positions and unscaled logits."""
