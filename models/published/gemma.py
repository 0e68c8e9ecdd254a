"""Gemma: Gemma Team, arXiv:2403.08295."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Description


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  family.only(hf_config, use_bidirectional_attention=False)
  name = family.choice(
    hf_config, "hidden_act", family.ACTIVATIONS, "gelu_pytorch_tanh"
  )
  # The first files say 'gelu' but mean the tanh approximation.
  name = "gelu_pytorch_tanh" if name == "gelu" else name
  # Later files repeat it under this key, which transformers 5 does not read.
  family.only(hf_config, hidden_activation=name)
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=family.size(hf_config, "head_dim", 256),
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 16),
    mlp_bias=False,
    activation=family.ACTIVATIONS[name],
    norm_kind="rms_from_one",
    embedding_scale=None,
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
  )


GEMMA = llama.LLAMA._replace(
  name="gemma",
  architectures={"GemmaForCausalLM": "tokens"},
  describe=describe,
)
"""Llama with scaled embeddings and norms that store their scales minus 1."""
