"""Qwen3: Yang et al., arXiv:2505.09388."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """As `Family.describe`."""
  family.only(theirs, use_sliding_window=False)
  others: dict[str, Any] = {"mlp_bias": False, "query_key_norm": "rms"}
  if theirs.get("head_dim") is None:
    others["head_dim"] = 128  # Its own default.
  return llama.describe(theirs, names, head, **others)


QWEN3 = llama.LLAMA._replace(
  name="qwen3",
  architectures={"Qwen3ForCausalLM": "tokens"},
  describe=describe,
)
"""Llama whose heads normalise their queries and keys."""
