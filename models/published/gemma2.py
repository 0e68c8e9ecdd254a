"""Gemma 2: Gemma Team, arXiv:2408.00118."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Description
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  **others: Any,
) -> Description:
  """Implements `Family.describe`; `others` are config fields in which a family differs."""
  family.only(hf_config, use_bidirectional_attention=False)
  scalar = family.positive(hf_config, "query_pre_attn_scalar", 256.0)
  if "decoder_attention" not in others:
    most = cap(hf_config, "attn_logit_softcapping", 50.0)
    own = {} if most is None else {"logits_soft_cap": most}
    kinds = llama.layer_types(hf_config, llama.NEAR, llama.is_last_of(2))
    others = {
      "decoder_attention": llama.windows(hf_config, kinds, own),
      "logit_soft_cap": cap(hf_config, "final_logit_softcapping", 30.0),
    }
  return llama.describe(
    hf_config,
    names,
    head,
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 4),
    mlp_bias=False,
    activation=family.activation(
      hf_config, "hidden_activation", "gelu_pytorch_tanh"
    ),
    norm="sandwich",
    norm_kind="rms_from_one",
    embedding_scale=None,
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    attention_scale=scalar**-0.5,
    head_dim=family.size(hf_config, "head_dim", 256),
    **others,
  )


def cap(
  hf_config: Mapping[str, Any], name: str, default: float | None
) -> float | None:
  """Returns a soft cap, or None for null."""
  if hf_config.get(name, default) is None:
    return None
  return family.positive(hf_config, name, default)


_NORMS = {
  "input_layernorm": "self_attention_norm",
  "post_attention_layernorm": "self_attention_out_norm",
  "pre_feedforward_layernorm": "mlp_norm",
  "post_feedforward_layernorm": "mlp_out_norm",
}

GEMMA2 = llama.LLAMA._replace(
  name="gemma2",
  architectures={"Gemma2ForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: llama.rows(_NORMS),
  without_effect=no_effect("follows from hidden_activation", "hidden_act"),
)
"""Windows in every other layer, soft caps, and norms of the outputs of sub-layers."""
