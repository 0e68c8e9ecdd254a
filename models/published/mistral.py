"""Mistral: Jiang et al., arXiv:2310.06825."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.published import family, llama
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any],
  names: Collection[str],
  head: str,
  window: int | None = 4096,
  **others: Any,
) -> Described:
  """Implements `Family.describe`; the window includes the query itself.

  Args:
    theirs: `config.json`.
    names: of its tensors.
    head: ours.
    window: in files that have none.
    **others: the fields in which a family differs.
  """
  others = {"attention_bias": False, "mlp_bias": False} | others
  window = family.optional_size(theirs, "sliding_window", window)
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
