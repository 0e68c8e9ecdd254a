"""Llama: Touvron et al., arXiv:2302.13971, and what follows its layout."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
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
  """
  near = "sliding_attention"
  kinds = layer_types(theirs, near, every)
  exact = AttentionConfig("dense", options)
  local, window = exact, family.size(theirs, "sliding_window", 4096)
  if window <= family.size(theirs, "max_position_embeddings"):
    sides = {"window": (window - 1, 0)}
    local = AttentionConfig("sliding_window", {**options, **sides})
  return tuple(local if kind == near else exact for kind in kinds)


EXACT = "full_attention"
"""Type of a layer whose queries see every key."""


def layer_types(
  theirs: Mapping[str, Any], other: str, every: int
) -> Sequence[str]:
  """Type of every layer: `EXACT` of every so-many-th one, or as the file says.

  Raises:
    ValueError: `layer_types` has something else, or not one for each layer.
  """
  count = family.size(theirs, "num_hidden_layers")
  if theirs.get("layer_types") is None:
    return [EXACT if (i + 1) % every == 0 else other for i in range(count)]
  kinds = family.value(theirs, "layer_types", list[str])
  if len(kinds) != count or not set(kinds) <= {other, EXACT}:
    raise ValueError(
      f"layer_types: expected {count} of {other} and {EXACT}, got {kinds}"
    )
  return kinds


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


_NORMS = MappingProxyType(
  {
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "mlp_norm",
  }
)


def rows(norms: Mapping[str, str] = _NORMS) -> list[Row]:
  """The table of a family whose layers have these norms: theirs -> ours."""
  theirs, ours = "model.layers.{i}", "decoder_{i}"
  projections = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
  parts = {
    **{f"self_attn.{x}": f"self_attention/{y}" for x, y in projections.items()},
    "self_attn.o_proj": "self_attention/out",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/hidden",
    "mlp.down_proj": "mlp/out",
  }
  norms = {
    "self_attn.q_norm": "self_attention/query_norm",
    "self_attn.k_norm": "self_attention/key_norm",
    **norms,
  }
  table = family.table("model.embed_tokens", "target_embedding")
  for old, new in parts.items():
    table += family.linear(f"{theirs}.{old}", f"{ours}/{new}")
  for old, new in norms.items():
    table += family.norm(f"{theirs}.{old}", f"{ours}/{new}")
  table += family.norm("model.norm", "decoder_norm")
  return table + family.table("lm_head", "output_embedding")


LLAMA = Family(
  name="llama",
  architectures={"LlamaForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: rows(),
  prefix="model.",
  parts=("embed_tokens", "layers", "norm"),
  unread=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
"""Decoders with rotary positions, grouped heads and gated layers."""
