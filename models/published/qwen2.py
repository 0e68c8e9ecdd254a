"""Qwen2 and Qwen2.5: Yang et al., arXiv:2407.10671 and arXiv:2412.15115."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama
from models.published.family import Description
from models.published.keys import no_effect
from settings.fields import Whole


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  family.only(hf_config, use_mrope=False)
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=None,
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 32),
    attention_bias=True,
    out_bias=False,
    mlp_bias=False,
    decoder_attention=last_windows(hf_config),
  )


def last_windows(hf_config: Mapping[str, Any]) -> tuple[AttentionConfig, ...]:
  """Returns the mechanisms of layers; the last ones may have a window."""
  first = family.value(hf_config, "max_window_layers", Whole, 28)
  return chosen_windows(hf_config, lambda i: i < first)


def chosen_windows(
  hf_config: Mapping[str, Any], is_exact: Callable[[int], bool]
) -> tuple[AttentionConfig, ...]:
  """Returns the mechanisms of layers; some may have a window.

  Args:
    hf_config: `config.json`.
    is_exact: whether layer i has no window, in files without `layer_types`.
  """
  has_windows = family.flag(hf_config, "use_sliding_window", False)
  if has_windows:
    family.size(hf_config, "sliding_window", 4096)
  kinds = llama.layer_types(
    hf_config, llama.NEAR, lambda i: is_exact(i) or not has_windows
  )
  if llama.NEAR in kinds and not has_windows:
    raise ValueError(
      f"use_sliding_window: expected true with {llama.NEAR} in layer_types, got "
      "false"
    )
  return llama.windows(hf_config, kinds)


WITHOUT_EFFECT = {
  **no_effect("follows from layer_types", "max_window_layers"),
  **no_effect("is used only with use_sliding_window", "sliding_window"),
  **llama.LLAMA.without_effect,
}

QWEN2 = llama.LLAMA._replace(
  name="qwen2",
  architectures={"Qwen2ForCausalLM": "tokens"},
  describe=describe,
  without_effect=WITHOUT_EFFECT,
)
"""Llama with biases of queries, keys and values, and windows in the last layers."""
