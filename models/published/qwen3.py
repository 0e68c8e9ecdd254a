"""Qwen3: Yang et al., arXiv:2505.09388."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama, qwen2
from models.published.family import Description


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=family.size(hf_config, "head_dim", 128),
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 32),
    mlp_bias=False,
    query_key_norm="rms",
    decoder_attention=qwen2.last_windows(hf_config),
  )


QWEN3 = qwen2.QWEN2._replace(
  name="qwen3",
  architectures={"Qwen3ForCausalLM": "tokens"},
  describe=describe,
)
"""Llama with norms of the queries and keys of each head, and windows as in Qwen2."""
