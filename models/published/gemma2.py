"""Gemma 2: Gemma Team, arXiv:2408.00118."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """As `Family.describe`."""
  family.only(theirs, use_bidirectional_attention=False)
  scalar = family.number(theirs, "query_pre_attn_scalar", 256.0)
  if scalar <= 0.0:
    raise ValueError(
      f"query_pre_attn_scalar: expected more than 0, got {scalar}"
    )
  others: dict[str, Any] = {
    "mlp_bias": False,
    "activation": family.activation(
      theirs, "hidden_activation", "gelu_pytorch_tanh"
    ),
    "norm": "sandwich",
    "norm_kind": "rms_from_one",
    "embedding_scale": None,
    "tie_embeddings": family.flag(theirs, "tie_word_embeddings", True),
    "attention_scale": scalar**-0.5,
    "logit_soft_cap": _cap(theirs, "final_logit_softcapping", 30.0),
    "decoder_attention": _layers(theirs),
  }
  if theirs.get("head_dim") is None:
    others["head_dim"] = 256  # Its own default.
  return llama.describe(theirs, names, head, **others)


def _cap(theirs: Mapping[str, Any], name: str, default: float) -> float | None:
  """A soft cap, which null takes away."""
  if name in theirs and theirs[name] is None:
    return None
  return family.number(theirs, name, default)


def _layers(theirs: Mapping[str, Any]) -> tuple[AttentionConfig, ...]:
  """A window in every other layer, all with the cap of attention."""
  cap = _cap(theirs, "attn_logit_softcapping", 50.0)
  own = {} if cap is None else {"logits_soft_cap": cap}
  return llama.windows(theirs, every=2, options=own)


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
)
"""Windows in every other layer, soft caps, and norms of what layers add."""
