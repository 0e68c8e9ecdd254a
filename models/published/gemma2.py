"""Gemma 2: Gemma Team, arXiv:2408.00118."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Described
from models.published.keys import because


def describe(
  theirs: Mapping[str, Any],
  names: Collection[str],
  head: str,
  **others: Any,
) -> Described:
  """Implements `Family.describe`; `others` are the fields in which a family differs."""
  family.only(theirs, use_bidirectional_attention=False)
  scalar = family.number(theirs, "query_pre_attn_scalar", 256.0)
  if scalar <= 0.0:
    raise ValueError(
      f"query_pre_attn_scalar: expected more than 0, got {scalar}"
    )
  if "decoder_attention" not in others:
    most = cap(theirs, "attn_logit_softcapping", 50.0)
    own = {} if most is None else {"logits_soft_cap": most}
    kinds = llama.layer_types(theirs, llama.NEAR, llama.last_of(2))
    others = {
      "decoder_attention": llama.windows(theirs, kinds, own),
      "logit_soft_cap": cap(theirs, "final_logit_softcapping", 30.0),
    }
  return llama.describe(
    theirs,
    names,
    head,
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 4),
    mlp_bias=False,
    activation=family.activation(
      theirs, "hidden_activation", "gelu_pytorch_tanh"
    ),
    norm="sandwich",
    norm_kind="rms_from_one",
    embedding_scale=None,
    tie_embeddings=family.flag(theirs, "tie_word_embeddings", True),
    attention_scale=scalar**-0.5,
    head_dim=family.size(theirs, "head_dim", 256),
    **others,
  )


def cap(
  theirs: Mapping[str, Any], name: str, default: float | None
) -> float | None:
  """Returns a soft cap, or None for null."""
  if theirs.get(name, default) is None:
    return None
  return family.number(theirs, name, default)


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
  without_effect=because("is said by hidden_activation", "hidden_act"),
)
"""Windows in every other layer, soft caps, and norms of the outputs of sub-layers."""
