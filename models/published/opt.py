"""OPT: Zhang et al., arXiv:2205.01068."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.config import ModelConfig
from models.published import family
from models.published.family import Description, Family
from models.published.keys import no_effect

_OFFSET = 2
"""Position of the first token, in the table of positions."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; masked inputs take no positions."""
  del names
  family.only(
    hf_config,
    layer_norm_elementwise_affine=True,
    _remove_final_layer_norm=False,
  )
  features = family.size(hf_config, "hidden_size")
  width = family.optional_size(hf_config, "word_embed_proj_dim") or features
  has_bias = family.flag(hf_config, "enable_bias", True)
  vocab_size = family.size(hf_config, "vocab_size")
  own: dict[str, Any] = {}
  if width != features:
    own = {"embedding_dim": width, "projected": "tokens"}
  is_before = family.flag(hf_config, "do_layer_norm_before", True)
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=family.size(hf_config, "num_hidden_layers"),
    num_heads=family.size(hf_config, "num_attention_heads"),
    features=features,
    mlp_features=family.size(hf_config, "ffn_dim"),
    mlp_bias=has_bias,
    activation=family.activation(hf_config, "activation_function", "relu"),
    attention_bias=has_bias,
    dropout_rate=family.number(hf_config, "dropout", 0.1),
    position="learned",
    position_offset=_OFFSET,
    position_skips_masked=True,
    norm="pre" if is_before else "post",
    norm_epsilon=1e-5,
    embedding_scale=1.0,
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    head=head,
    **own,
  )
  length = family.size(hf_config, "max_position_embeddings")
  return Description(config, vocab_size, vocab_size, length)


_LAYER = "model.decoder.layers.{i}"
_PARTS = {
  "self_attn.q_proj": "self_attention/query",
  "self_attn.k_proj": "self_attention/key",
  "self_attn.v_proj": "self_attention/value",
  "self_attn.out_proj": "self_attention/out",
  "fc1": "mlp/hidden",
  "fc2": "mlp/out",
}

OPT = Family(
  name="opt",
  architectures={"OPTForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: (
    *family.table("model.decoder.embed_tokens", "target_embedding"),
    *family.table("model.decoder.embed_positions", "target_positions"),
    *family.linear("model.decoder.project_in", "target_projection"),
    *(
      row
      for theirs, ours in _PARTS.items()
      for row in family.linear(f"{_LAYER}.{theirs}", f"decoder_{{i}}/{ours}")
    ),
    *family.norm(
      f"{_LAYER}.self_attn_layer_norm", "decoder_{i}/self_attention_norm"
    ),
    *family.norm(f"{_LAYER}.final_layer_norm", "decoder_{i}/mlp_norm"),
    *family.norm("model.decoder.final_layer_norm", "decoder_norm"),
    *family.linear("model.decoder.project_out", "head/projection"),
    *family.table("lm_head", "output_embedding"),
  ),
  prefix="model.",
  parts=("decoder",),
  copies=(("lm_head.weight", "model.decoder.embed_tokens.weight"),),
  without_effect=no_effect(
    "affects only training", "layerdrop init_std activation_dropout"
  ),
)
"""Decoders with learned positions, whose norms may follow the sub-layers."""
