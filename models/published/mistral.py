"""Mistral: Jiang et al., arXiv:2310.06825; Ministral 3, arXiv:2601.08584."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama, rotary
from models.published.family import Description


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  window: int | None = 4096,
  **others: Any,
) -> Description:
  """Implements `Family.describe`; the window includes the query itself.

  Args:
    hf_config: `config.json`.
    names: names of the tensors.
    head: our name of the head.
    window: window in files without the key.
    **others: config fields in which a family differs.
  """
  fields: dict[str, Any] = {
    "num_kv_heads": family.optional_size(hf_config, "num_key_value_heads", 8),
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_attention": mechanism(hf_config, window),
  }
  return llama.describe(hf_config, names, head, **fields | others)


def mechanism(
  hf_config: Mapping[str, Any], default: int | None
) -> AttentionConfig:
  """Returns the mechanism of all layers: exact, or with a window.

  Args:
    hf_config: `config.json`.
    default: window in files without the key.
  """
  window = family.optional_size(hf_config, "sliding_window", default)
  if window and window <= family.size(hf_config, "max_position_embeddings"):
    return AttentionConfig("sliding_window", {"window": (window - 1, 0)})
  return AttentionConfig("dense")


MISTRAL = llama.LLAMA._replace(
  name="mistral",
  architectures={"MistralForCausalLM": "tokens"},
  describe=describe,
)
"""Llama with a window of preceding keys."""

_YARN: rotary.LayerTypes = {
  None: rotary.Rotary(
    default=None, ignored=("llama_4_scaling_beta", "max_position_embeddings")
  )
}


def describe_with_temperature(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for Ministral 3."""
  choices = rotary.choices(hf_config, _YARN)
  parameters = (
    hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
  )
  key = (
    "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
  )
  kind = "yarn"
  try:
    family.only(parameters, rope_type=kind, type=kind)
    rate = family.number(parameters, "llama_4_scaling_beta", None)
    length = family.size(parameters, "original_max_position_embeddings")
  except ValueError as error:
    raise ValueError(f"{key}: {error}") from None
  return describe(
    hf_config,
    names,
    head,
    window=None,
    head_dim=family.optional_size(hf_config, "head_dim", 128),
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    query_temperature="steps",
    temperature_rate=rate,
    temperature_length=length,
    **choices,
  )


MINISTRAL3 = MISTRAL._replace(
  name="ministral3",
  architectures={"Ministral3ForCausalLM": "tokens"},
  describe=describe_with_temperature,
  rotary=_YARN,
)
"""Mistral whose queries are scaled by position."""
