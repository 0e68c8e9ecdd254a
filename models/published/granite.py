"""Granite 3: Granite Team, IBM 2024, Granite 3.0 language models."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Description


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  divisor = family.number(hf_config, "logits_scaling", 1.0)
  if divisor == 0.0:
    raise ValueError("logits_scaling: expected a number other than 0, got 0.0")
  factors = 1.0, family.number(hf_config, "residual_multiplier", 1.0)
  return llama.describe(
    hf_config,
    names,
    head,
    attention_scale=family.positive(hf_config, "attention_multiplier", 1.0),
    embedding_scale=family.number(hf_config, "embedding_multiplier", 1.0),
    residual_factors=factors,
    mlp_residual_factors=factors,
    logit_scale=1.0 / divisor,
  )


GRANITE = llama.LLAMA._replace(
  name="granite",
  architectures={"GraniteForCausalLM": "tokens"},
  describe=describe,
)
"""Llama with factors of embeddings, attention logits, sub-layers and logits."""
