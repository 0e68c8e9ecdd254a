"""Qwen2 and Qwen2.5: Yang et al., arXiv:2407.10671 and arXiv:2412.15115."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama
from models.published.family import Described
from models.published.keys import because
from settings.fields import Whole


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`."""
  family.only(theirs, use_mrope=False)
  return llama.describe(
    theirs,
    names,
    head,
    head_dim=None,
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 32),
    attention_bias=True,
    out_bias=False,
    mlp_bias=False,
    decoder_attention=last_windows(theirs),
  )


def last_windows(theirs: Mapping[str, Any]) -> tuple[AttentionConfig, ...]:
  """Returns the mechanisms of layers, of which the last may have a window."""
  first = family.value(theirs, "max_window_layers", Whole, 28)
  return chosen_windows(theirs, lambda i: i < first)


def chosen_windows(
  theirs: Mapping[str, Any], is_exact: Callable[[int], bool]
) -> tuple[AttentionConfig, ...]:
  """Returns the mechanisms of layers, of which some may have a window.

  Args:
    theirs: `config.json`.
    is_exact: whether layer i has none, in files without `layer_types`.
  """
  has_windows = family.flag(theirs, "use_sliding_window", False)
  if has_windows:
    family.size(theirs, "sliding_window", 4096)
  kinds = llama.layer_types(
    theirs, llama.NEAR, lambda i: is_exact(i) or not has_windows
  )
  if llama.NEAR in kinds and not has_windows:
    raise ValueError(
      f"use_sliding_window: expected true with {llama.NEAR} in layer_types, got "
      "false"
    )
  return llama.windows(theirs, kinds)


WITHOUT_EFFECT = {
  **because("is said by layer_types", "max_window_layers"),
  **because("is of windows, which use_sliding_window has", "sliding_window"),
  **llama.LLAMA.without_effect,
}

QWEN2 = llama.LLAMA._replace(
  name="qwen2",
  architectures={"Qwen2ForCausalLM": "tokens"},
  describe=describe,
  without_effect=WITHOUT_EFFECT,
)
"""Llama with biases of queries, keys and values, and windows in the last layers."""
