"""Llama: Touvron et al., arXiv:2302.13971, and families with its layout."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.published import family, rotary
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  length: str = "max_position_embeddings",
  **others: Any,
) -> Description:
  """Implements `Family.describe`; `others` are config fields in which a family differs.

  Args:
    hf_config: `config.json`.
    names: names of the tensors.
    head: our name of the head.
    length: key of the longest sequence.
    **others: values of config fields, whose keys are then not read.
  """
  del names
  family.only(hf_config, rope_interleaved=False)
  vocab_size = family.size(hf_config, "vocab_size")
  heads = family.size(hf_config, "num_attention_heads")
  # If a family replaces a field, its key is not read and has no effect.
  read: dict[str, Callable[[], Any]] = {
    "num_heads": lambda: heads,
    "head_dim": lambda: family.optional_size(hf_config, "head_dim"),
    "num_kv_heads": lambda: (
      family.optional_size(hf_config, "num_key_value_heads") or heads
    ),
    "attention_bias": lambda: family.flag(hf_config, "attention_bias", False),
    "mlp_features": lambda: family.size(hf_config, "intermediate_size"),
    "mlp_bias": lambda: family.flag(hf_config, "mlp_bias", False),
    "activation": lambda: family.activation(hf_config, "hidden_act", "silu"),
    "norm_epsilon": lambda: family.number(hf_config, "rms_norm_eps", 1e-6),
    "tie_embeddings": lambda: family.flag(
      hf_config, "tie_word_embeddings", False
    ),
  }
  choices: dict[str, Any] = {
    "norm": "pre",
    "norm_kind": "rms",
    "gated": True,
    "position": "rotary",
    "embedding_scale": 1.0,
    **{name: value() for name, value in read.items() if name not in others},
  }
  if not {"rotary_theta", "decoder_around", "position"} & {*others}:
    choices |= rotary.choices(hf_config)
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=family.size(hf_config, "num_hidden_layers"),
    features=family.size(hf_config, "hidden_size"),
    head=head,
    **choices | others,
  )
  longest = family.size(hf_config, length)
  return Description(config, vocab_size, vocab_size, longest)


NEAR = "sliding_attention"
"""Type of a layer with a window, which includes the query's own key."""

EXACT = "full_attention"
"""Type of a layer whose queries attend to all keys."""


def windows(
  hf_config: Mapping[str, Any],
  kinds: Sequence[str],
  options: Mapping[str, Any] = MappingProxyType({}),
  default: int = 4096,
) -> tuple[AttentionConfig, ...]:
  """Returns the mechanisms of layers of types `NEAR` and `EXACT`.

  Args:
    hf_config: `config.json`.
    kinds: types of the layers.
    options: options of all these mechanisms.
    default: window in files without the key.
  """
  exact = AttentionConfig("dense", options)
  if NEAR not in kinds:
    family.optional_size(
      hf_config, "sliding_window", default
    )  # Checked, but without effect.
    return (exact,)
  local, window = exact, family.size(hf_config, "sliding_window", default)
  if window <= family.size(hf_config, "max_position_embeddings"):
    sides = {"window": (window - 1, 0)}
    local = AttentionConfig("sliding_window", {**options, **sides})
  return tuple(local if kind == NEAR else exact for kind in kinds)


def layer_types(
  hf_config: Mapping[str, Any], other: str, default: Callable[[int], bool]
) -> Sequence[str]:
  """Returns the type of every layer, from the file or by default.

  Args:
    hf_config: `config.json`.
    other: the type that is not `EXACT`.
    default: whether layer i is `EXACT` by default.

  Raises:
    ValueError: `layer_types` has an unknown type, or not one per layer.
  """
  kinds = family.per_layer(hf_config, "layer_types", (other, EXACT))
  if kinds is not None:
    return kinds
  count = family.size(hf_config, "num_hidden_layers")
  return [EXACT if default(i) else other for i in range(count)]


def is_last_of(every: int) -> Callable[[int], bool]:
  """Returns whether layer i is the last of its group of `every` layers."""
  return lambda i: (i + 1) % every == 0


_NORMS = MappingProxyType(
  {
    "input_layernorm": "self_attention_norm",
    "post_attention_layernorm": "mlp_norm",
  }
)


def rows(norms: Mapping[str, str] = _NORMS) -> list[Row]:
  """Returns the table of a family with these norms, transformers' name -> ours."""
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
  without_effect=no_effect(
    "follows from other keys", "max_sequence_length is_llama_config"
  ),
  copies=(("lm_head.weight", "model.embed_tokens.weight"),),
  rotary=rotary.ALL,
)
"""Decoders with rotary positions, grouped queries and gated feed-forward layers."""
