"""Llama: Touvron et al., arXiv:2302.13971, and what follows its layout."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.published import family
from models.published.family import Described, Family, Row


def describe(
  theirs: Mapping[str, Any],
  names: Collection[str],
  head: str,
  **others: Any,
) -> Described:
  """As `Family.describe`; `others` are choices in which a family differs."""
  del names
  _check_rotary(theirs)
  vocab_size = family.size(theirs, "vocab_size")
  heads = family.size(theirs, "num_attention_heads")
  choices: dict[str, Any] = {
    "head_dim": None
    if theirs.get("head_dim") is None
    else family.size(theirs, "head_dim"),
    "attention_bias": family.flag(theirs, "attention_bias", False),
    "mlp_bias": family.flag(theirs, "mlp_bias", False),
    "activation": family.activation(theirs, "hidden_act", "silu")
    if "activation" not in others
    else None,
    "norm": "pre",
    "norm_kind": "rms",
    "norm_epsilon": family.number(theirs, "rms_norm_eps", 1e-6),
    "embedding_scale": 1.0,
    "tie_embeddings": family.flag(theirs, "tie_word_embeddings", False),
  }
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=family.size(theirs, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=family.size(theirs, "num_key_value_heads", heads),
    features=family.size(theirs, "hidden_size"),
    mlp_features=family.size(theirs, "intermediate_size"),
    gated=True,
    position="rotary",
    rotary_theta=family.number(theirs, "rope_theta", 10000.0),
    head=head,
    **choices | others,
  )
  length = family.size(theirs, "max_position_embeddings")
  return Described(config, vocab_size, vocab_size, length)


def windows(
  theirs: Mapping[str, Any], every: int, options: Mapping[str, Any]
) -> tuple[AttentionConfig, ...]:
  """Mechanisms of layers of which some see a window, which counts the query itself.

  Args:
    theirs: `config.json`.
    every: where it does not say which, every so-many-th layer sees everything.
    options: of all mechanisms.

  Raises:
    ValueError: `layer_types` has something else, or not one for each layer.
  """
  near, all_keys = "sliding_attention", "full_attention"
  count = family.size(theirs, "num_hidden_layers")
  kinds = theirs.get("layer_types")
  if kinds is None:
    kinds = [near if (i + 1) % every else all_keys for i in range(count)]
  if len(kinds) != count or not set(kinds) <= {near, all_keys}:
    raise ValueError(
      f"layer_types: expected {count} of {near} and {all_keys}, got {kinds}"
    )
  exact = AttentionConfig("dense", options)
  local, window = exact, family.size(theirs, "sliding_window", 4096)
  if window <= family.size(theirs, "max_position_embeddings"):
    sides = {"window": (window - 1, 0)}
    local = AttentionConfig("sliding_window", {**options, **sides})
  return tuple(local if kind == near else exact for kind in kinds)


def _check_rotary(theirs: Mapping[str, Any]) -> None:
  """Refuses wavelengths that are stretched for longer contexts."""
  scaling = theirs.get("rope_scaling") or {"rope_type": "default"}
  if not isinstance(scaling, dict) or "default" not in (
    scaling.get("rope_type"),
    scaling.get("type"),
  ):
    raise ValueError(
      f"rope_scaling: expected none, as only the wavelengths of rope_theta are "
      f"known here, got {scaling}"
    )


def layer_rows() -> list[Row]:
  """The rows of one layer."""
  theirs, ours = "model.layers.{i}", "decoder_{i}"
  slot = f"{ours}/self_attention"
  return [
    *family.norm(f"{theirs}.input_layernorm", f"{slot}_norm"),
    *family.linear(f"{theirs}.self_attn.q_proj", f"{slot}/query"),
    *family.linear(f"{theirs}.self_attn.k_proj", f"{slot}/key"),
    *family.linear(f"{theirs}.self_attn.v_proj", f"{slot}/value"),
    *family.linear(f"{theirs}.self_attn.o_proj", f"{slot}/out"),
    *family.norm(f"{theirs}.self_attn.q_norm", f"{slot}/query_norm"),
    *family.norm(f"{theirs}.self_attn.k_norm", f"{slot}/key_norm"),
    *family.norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm"),
    *family.linear(f"{theirs}.mlp.gate_proj", f"{ours}/mlp/gate"),
    *family.linear(f"{theirs}.mlp.up_proj", f"{ours}/mlp/hidden"),
    *family.linear(f"{theirs}.mlp.down_proj", f"{ours}/mlp/out"),
  ]


LLAMA = Family(
  name="llama",
  architectures={"LlamaForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: (
    *family.table("model.embed_tokens", "target_embedding"),
    *layer_rows(),
    *family.norm("model.norm", "decoder_norm"),
    *family.table("lm_head", "output_embedding"),
  ),
  prefix="model.",
  parts=("embed_tokens", "layers", "norm"),
  unread=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
"""Decoders with rotary positions, grouped heads and gated layers."""
