"""GPT-NeoX: Black et al., arXiv:2204.06745; Pythia has the same layout."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from models import nested
from models.config import ModelConfig
from models.published import family, rotary
from models.published.family import Description, Family, Layout, Row


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  vocab_size = family.size(hf_config, "vocab_size")
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=family.size(hf_config, "num_hidden_layers"),
    num_heads=family.size(hf_config, "num_attention_heads"),
    features=family.size(hf_config, "hidden_size"),
    mlp_features=family.size(hf_config, "intermediate_size"),
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    attention_bias=family.flag(hf_config, "attention_bias", True),
    parallel=family.flag(hf_config, "use_parallel_residual", True),
    dropout_rate=family.number(hf_config, "hidden_dropout", 0.0),
    position="rotary",
    **rotary.choices(hf_config, _ROTARY),
    norm="pre",
    norm_epsilon=family.number(hf_config, "layer_norm_eps", 1e-5),
    embedding_scale=1.0,
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", False),
    head=head,
  )
  length = family.size(hf_config, "max_position_embeddings")
  return Description(config, vocab_size, vocab_size, length)


_ROTARY: rotary.LayerTypes = {
  None: rotary.Rotary(
    theta=("rotary_emb_base", "rope_theta"),
    share=("rotary_pct", "partial_rotary_factor"),
    default_share=0.25,
  )
}


def to_json(description: Description) -> dict[str, Any]:
  """Implements `Family.to_json`."""
  config = description.config
  scaling = config.slot.rotary_scaling
  return {
    "model_type": "gpt_neox",
    "vocab_size": description.vocab_size,
    "max_position_embeddings": description.max_length,
    "hidden_size": config.features,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "intermediate_size": config.mlp_features,
    "hidden_act": family.their_activation(config.activation),
    "attention_bias": config.slot.attention_bias,
    "use_parallel_residual": config.parallel,
    "hidden_dropout": config.dropout_rate,
    "attention_dropout": config.attention_dropout_rate,
    "rotary_emb_base": config.slot.rotary_theta,
    "rotary_pct": config.slot.rotary_fraction,
    "rope_scaling": scaling and scaling.scaling,
    "layer_norm_eps": config.norm_epsilon,
    "tie_word_embeddings": config.tie_embeddings,
  }


def _interleaved_layout(heads: int) -> Layout:
  """The layout that interleaves query, key and value by heads."""

  def read(x, n):
    parts = x.reshape(heads, n, -1, *x.shape[1:])
    return [parts[:, i].reshape(-1, *x.shape[1:]).T for i in range(n)]

  def write(xs):
    parts = [x.T.reshape(heads, 1, -1, *x.T.shape[1:]) for x in xs]
    together = np.concatenate(parts, axis=1)
    return together.reshape(-1, *xs[0].T.shape[1:])

  return Layout(read, write)


def _rows(config: ModelConfig) -> list[Row]:
  theirs, ours = "gpt_neox.layers.{i}", "decoder_{i}"
  module = f"{ours}/self_attention"
  names = ("query", "key", "value")
  layout = _interleaved_layout(config.num_heads)
  fused = f"{theirs}.attention.query_key_value"
  return [
    *family.table("gpt_neox.embed_in", "target_embedding"),
    *family.norm(f"{theirs}.input_layernorm", f"{module}_norm"),
    Row(
      f"{fused}.weight",
      tuple(f"params/{module}/{name}/kernel" for name in names),
      layout,
    ),
    Row(
      f"{fused}.bias",
      tuple(f"params/{module}/{name}/bias" for name in names),
      layout,
    ),
    *family.linear(f"{theirs}.attention.dense", f"{module}/out"),
    *family.norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm"),
    *family.linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/mlp/hidden"),
    *family.linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/mlp/out"),
    *family.norm("gpt_neox.final_layer_norm", "decoder_norm"),
    *family.table("embed_out", "output_embedding"),
  ]


GPT_NEOX = Family(
  name="gpt_neox",
  architectures={"GPTNeoXForCausalLM": "tokens"},
  describe=describe,
  rows=_rows,
  prefix="gpt_neox.",
  parts=("embed_in", "layers", "final_layer_norm"),
  copies=(("embed_out.weight", "gpt_neox.embed_in.weight"),),
  unread=(r"gpt_neox\.layers\.\d+\.attention\.bias",),
  rotary=_ROTARY,
  to_json=to_json,
)
"""Decoders with rotary positions for a fraction of each head."""
