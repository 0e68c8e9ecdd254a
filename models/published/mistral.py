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
  others: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
  window = family.optional_size(theirs, "sliding_window", 4096)
  if window and window <= family.size(theirs, "max_position_embeddings"):
    others["decoder_attention"] = AttentionConfig(
      "sliding_window", {"window": (window - 1, 0)}
    )
  return llama.describe(theirs, names, head, **others)


MISTRAL = llama.LLAMA._replace(
  name="mistral",
  architectures={"MistralForCausalLM": "tokens"},
  describe=describe,
)
"""Llama whose queries see a window of preceding keys."""
