"""SmolLM3: Hugging Face 2025, after NoPE, arXiv:2305.19466 and arXiv:2501.18795."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_module_config import AroundConfig
from models.published import family, llama, qwen2, rotary
from models.published.family import Description
from models.published.keys import no_effect

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default=2e6)}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; some layers have no positions."""
  is_rotary = _has_rotary(hf_config)
  if family.flag(hf_config, "use_sliding_window", False):
    family.size(hf_config, "sliding_window")  # Required here.
  overrides = (AroundConfig(position="none"), AroundConfig())
  return llama.describe(
    hf_config,
    names,
    head,
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 4),
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    **rotary.choices(hf_config, _ROTARY),
    decoder_attention=qwen2.chosen_windows(hf_config, lambda i: is_rotary[i]),
    decoder_around=tuple(overrides[one] for one in is_rotary),
  )


def _has_rotary(hf_config: Mapping[str, Any]) -> list[bool]:
  """Returns whether each layer has rotary positions."""
  given = family.per_layer(hf_config, "no_rope_layers", (0, 1))
  if given is not None:
    return [one == 1 for one in given]
  every = family.size(hf_config, "no_rope_layer_interval", 4)
  count = family.size(hf_config, "num_hidden_layers")
  return [not llama.is_last_of(every)(i) for i in range(count)]


SMOLLM3 = qwen2.QWEN2._replace(
  name="smollm3",
  architectures={"SmolLM3ForCausalLM": "tokens"},
  describe=describe,
  rotary=_ROTARY,
  without_effect={
    **no_effect("follows from no_rope_layers", "no_rope_layer_interval"),
    **no_effect("is used only with use_sliding_window", "sliding_window"),
  },
)
"""Llama without positions in some layers, which may have a window."""
