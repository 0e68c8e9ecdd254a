"""Mistral: Jiang et al., arXiv:2310.06825."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; the window includes the query itself."""
  return llama.describe(
    theirs,
    names,
    head,
    attention_bias=False,
    mlp_bias=False,
    decoder_attention=window(theirs, 4096),
  )


def window(
  theirs: Mapping[str, Any], default: int | None
) -> AttentionConfig | None:
  """Returns the mechanism of all layers; None without a window."""
  size = family.optional_size(theirs, "sliding_window", default)
  if not size or size > family.size(theirs, "max_position_embeddings"):
    return None
  return AttentionConfig("sliding_window", {"window": (size - 1, 0)})


MISTRAL = llama.LLAMA._replace(
  name="mistral",
  architectures={"MistralForCausalLM": "tokens"},
  describe=describe,
)
"""Llama whose queries see a window of preceding keys."""
