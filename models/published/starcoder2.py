"""StarCoder 2: Lozhkov et al., arXiv:2402.19173."""

from collections.abc import Collection, Mapping
from typing import Any

from models.config import ModelConfig
from models.published import family, llama, mistral
from models.published.family import Description, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  has_bias = family.flag(hf_config, "use_bias", True)
  return llama.describe(
    hf_config,
    names,
    head,
    num_kv_heads=family.size(hf_config, "num_key_value_heads", 2),
    attention_bias=has_bias,
    mlp_bias=has_bias,
    gated=False,
    activation=family.activation(hf_config, "hidden_act", "gelu_pytorch_tanh"),
    norm_kind="layer",
    norm_epsilon=family.number(hf_config, "norm_epsilon", 1e-5),
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    decoder_attention=mistral.mechanism(hf_config, None),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with ungated feed-forward layers."""
  theirs, ours = "model.layers.{i}.mlp", "decoder_{i}/mlp"
  return [
    *(row for row in llama.LLAMA.rows(config) if ".mlp." not in row.theirs),
    *family.linear(f"{theirs}.c_fc", f"{ours}/hidden"),
    *family.linear(f"{theirs}.c_proj", f"{ours}/out"),
  ]


STARCODER2 = llama.LLAMA._replace(
  name="starcoder2",
  architectures={"Starcoder2ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  without_effect=no_effect(
    "affects only training", "residual_dropout embedding_dropout"
  ),
)
"""Decoders with rotary positions, layer norms, biases and a window of keys."""
