"""GPT-2: Radford et al. 2019, Language models are unsupervised multitask learners."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.config import ModelConfig
from models.published import family
from models.published.family import CONCATENATED, Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  family.only(
    hf_config,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
  )
  features = family.size(hf_config, "n_embd")
  vocab_size = family.size(hf_config, "vocab_size")
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=family.size(hf_config, "n_layer"),
    num_heads=family.size(hf_config, "n_head"),
    features=features,
    mlp_features=family.optional_size(hf_config, "n_inner") or 4 * features,
    activation=family.activation(hf_config, "activation_function", "gelu_new"),
    attention_bias=True,
    dropout_rate=family.number(hf_config, "resid_pdrop", 0.1),
    position="learned",
    norm="pre",
    norm_epsilon=family.number(hf_config, "layer_norm_epsilon", 1e-5),
    embedding_scale=1.0,
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    head=head,
  )
  length = family.size(hf_config, "n_positions")
  return Description(config, vocab_size, vocab_size, length)


def to_json(description: Description) -> dict[str, Any]:
  """Implements `Family.to_json`."""
  config = description.config
  return {
    "model_type": "gpt2",
    "vocab_size": description.vocab_size,
    "n_positions": description.max_length,
    "n_embd": config.features,
    "n_layer": config.num_layers,
    "n_head": config.num_heads,
    "n_inner": config.mlp_features,
    "activation_function": family.their_activation(config.activation),
    "resid_pdrop": config.dropout_rate,
    "embd_pdrop": config.dropout_rate,
    "attn_pdrop": config.attention_dropout_rate,
    "layer_norm_epsilon": config.norm_epsilon,
    "tie_word_embeddings": config.tie_embeddings,
  }


_BLOCK = "transformer.h.{i}"
_SLOT = "params/decoder_{i}/self_attention"


def _conv1d(theirs: str, *ours: str) -> list[Row]:
  """Pairs a Conv1D, `[in, out]` as in Flax, with our concatenated kernels."""
  return [
    Row(
      f"{theirs}.weight", tuple(f"{one}/kernel" for one in ours), CONCATENATED
    ),
    Row(f"{theirs}.bias", tuple(f"{one}/bias" for one in ours), CONCATENATED),
  ]


GPT2 = Family(
  name="gpt2",
  architectures={"GPT2LMHeadModel": "tokens"},
  describe=describe,
  rows=lambda config: (
    *family.table("transformer.wte", "target_embedding"),
    *family.table("transformer.wpe", "target_positions"),
    *family.norm(f"{_BLOCK}.ln_1", "decoder_{i}/self_attention_norm"),
    *_conv1d(
      f"{_BLOCK}.attn.c_attn",
      *(f"{_SLOT}/{x}" for x in ("query", "key", "value")),
    ),
    *_conv1d(f"{_BLOCK}.attn.c_proj", f"{_SLOT}/out"),
    *family.norm(f"{_BLOCK}.ln_2", "decoder_{i}/mlp_norm"),
    *_conv1d(f"{_BLOCK}.mlp.c_fc", "params/decoder_{i}/mlp/hidden"),
    *_conv1d(f"{_BLOCK}.mlp.c_proj", "params/decoder_{i}/mlp/out"),
    *family.norm("transformer.ln_f", "decoder_norm"),
    *family.table("lm_head", "output_embedding"),
  ),
  prefix="transformer.",
  parts=("wte", "wpe", "h", "ln_f"),
  copies=(("lm_head.weight", "transformer.wte.weight"),),
  unread=(r"transformer\.h\.\d+\.attn\.bias",),
  to_json=to_json,
  without_effect={
    **no_effect(
      "belongs to another head",
      "summary_type summary_use_proj summary_activation summary_proj_to_labels "
      "summary_first_dropout",
    ),
    **no_effect("follows from n_positions", "n_ctx"),
    **no_effect("affects only half precision", "reorder_and_upcast_attn"),
  },
)
"""Pre-norm decoders with learned positions; 'gelu_new' is the tanh approximation."""
