"""ModernBERT: Warner et al., arXiv:2412.13663."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from models import nested
from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import bert, family, llama, rotary
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect

_TYPES: rotary.LayerTypes = {
  llama.EXACT: rotary.Rotary(theta=("global_rope_theta",), default=160000.0),
  llama.NEAR: rotary.Rotary(theta=("local_rope_theta",)),
}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  kinds = _kinds(hf_config)
  has_bias = family.flag(hf_config, "norm_bias", False)
  longest = family.size(hf_config, "max_position_embeddings", 8192)
  exact = local = AttentionConfig("dense")
  if (side := family.size(hf_config, "local_attention", 128) // 2) < longest:
    local = AttentionConfig("sliding_window", {"window": side})
  mechanisms = {llama.EXACT: exact, llama.NEAR: local}
  positions = {kind: rotary.choices(hf_config, _TYPES, kind) for kind in _TYPES}
  config = nested.make(
    ModelConfig,
    kind="encoder",
    num_layers=len(kinds),
    num_heads=family.size(hf_config, "num_attention_heads", 12),
    features=family.size(hf_config, "hidden_size", 768),
    mlp_features=family.size(hf_config, "intermediate_size", 1152),
    mlp_bias=family.flag(hf_config, "mlp_bias", False),
    activation=family.activation(hf_config, "hidden_activation", "gelu"),
    gated=True,
    attention_bias=family.flag(hf_config, "attention_bias", False),
    position="rotary",
    norm="pre",
    norm_kind="layer" if has_bias else "layer_without_bias",
    norm_epsilon=family.number(hf_config, "norm_eps", 1e-5),
    embedding_norm=True,
    embedding_scale=1.0,
    encoder_attention=tuple(mechanisms[kind] for kind in kinds),
    encoder_around=tuple(
      # The norm of embeddings replaces the norm of the first layer's attention.
      AroundConfig(input_norm=None if i else False, **positions[kind])
      for i, kind in enumerate(kinds)
    ),
    head=head,
    **_head(hf_config, head),
  )
  vocab_size = family.size(hf_config, "vocab_size", 50368)
  return Description(
    config,
    vocab_size,
    bert.num_labels(hf_config) if head == "class" else vocab_size,
    longest,
  )


def _kinds(hf_config: Mapping[str, Any]) -> Sequence[str]:
  """Returns the type of every layer; files of transformers 4 have the period."""
  counted = "global_attn_every_n_layers"
  every = family.size(hf_config, counted, 3)
  kinds = llama.layer_types(hf_config, llama.NEAR, lambda i: i % every == 0)
  exact = [i for i, kind in enumerate(kinds) if kind == llama.EXACT]
  if counted in hf_config and exact != [*range(0, len(kinds), every)]:
    raise ValueError(f"{counted}: {every} contradicts layer_types")
  return kinds


def _head(hf_config: Mapping[str, Any], head: str) -> dict[str, Any]:
  """The rows of the head."""
  tied = family.flag(hf_config, "tie_word_embeddings", True)
  if head == "hidden":
    return {}
  choices = {
    "head_transform": True,
    "transform_bias": family.flag(hf_config, "classifier_bias", False),
    "transform_activation": family.activation(
      hf_config, "classifier_activation", "gelu"
    ),
  }
  if head == "tokens":
    has_bias = family.flag(hf_config, "decoder_bias", True)
    return {**choices, "head_bias": has_bias, "tie_embeddings": tied}
  pooled = family.choice(
    hf_config, "classifier_pooling", ("cls", "mean"), "cls"
  )
  return {**choices, "head_bias": True, "mean_pooling": pooled == "mean"}


_FUSED = Layout(
  lambda x, n: [part.T for part in np.split(x, n)],
  lambda xs: np.concatenate([x.T for x in xs]),
)
"""Several Dense layers, concatenated in one PyTorch Linear."""


def _fused_rows(theirs: str, *ours: str) -> list[Row]:
  return [
    Row(
      f"{theirs}.{name}", tuple(f"params/{one}/{own}" for one in ours), _FUSED
    )
    for name, own in (("weight", "kernel"), ("bias", "bias"))
  ]


def _rows() -> list[Row]:
  theirs, ours = "model.layers.{i}", "encoder_{i}"
  module = f"{ours}/self_attention"
  words = "model.embeddings.tok_embeddings"
  return [
    # For token logits, a tied softmax uses the same table.
    *family.table(words, "target_embedding"),
    *family.table(words, "source_embedding"),
    *family.norm("model.embeddings.norm", "source_embedding_norm"),
    *family.norm(f"{theirs}.attn_norm", f"{module}_norm"),
    *_fused_rows(
      f"{theirs}.attn.Wqkv",
      f"{module}/query",
      f"{module}/key",
      f"{module}/value",
    ),
    *family.linear(f"{theirs}.attn.Wo", f"{module}/out"),
    *family.norm(f"{theirs}.mlp_norm", f"{ours}/mlp_norm"),
    *_fused_rows(f"{theirs}.mlp.Wi", f"{ours}/mlp/gate", f"{ours}/mlp/hidden"),
    *family.linear(f"{theirs}.mlp.Wo", f"{ours}/mlp/out"),
    *family.norm("model.final_norm", "encoder_norm"),
    *family.linear("head.dense", "head/transform"),
    *family.norm("head.norm", "head/norm"),
    *family.table("decoder", "output_embedding"),
    Row("decoder.bias", ("params/head/bias",)),
    *family.linear("classifier", "head/classes"),
  ]


MODERNBERT = Family(
  name="modernbert",
  architectures={
    "ModernBertModel": "hidden",
    "ModernBertForMaskedLM": "tokens",
    "ModernBertForSequenceClassification": "class",
  },
  describe=describe,
  needs_first_token=True,
  rows=lambda config: _rows(),
  prefix="model.",
  parts=("embeddings", "layers", "final_norm"),
  copies=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
  rotary=_TYPES,
  without_effect={
    **no_effect(
      "affects only training",
      "embedding_dropout mlp_dropout sparse_prediction sparse_pred_ignore_index "
      "initializer_cutoff_factor",
    ),
    **no_effect(
      "selects an implementation of the same function",
      "deterministic_flash_attn reference_compile repad_logits_with_grad",
    ),
    **no_effect(
      "belongs to BERT, but the first files of ModernBERT have it",
      "layer_norm_eps position_embedding_type",
    ),
    **no_effect(
      "belongs to another head",
      "classifier_activation classifier_bias classifier_pooling decoder_bias "
      "tie_word_embeddings",
    ),
  },
)
"""Pre-norm encoders with rotary positions, windows in most layers and GeGLU."""
