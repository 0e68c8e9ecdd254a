"""Gemma: Gemma Team, arXiv:2403.08295."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`."""
  family.only(theirs, use_bidirectional_attention=False)
  name = family.choice(
    theirs, "hidden_act", family.ACTIVATIONS, "gelu_pytorch_tanh"
  )
  # The first files say 'gelu' and mean its approximation.
  name = "gelu_pytorch_tanh" if name == "gelu" else name
  # Later files repeat it under this key, which version 5 does not read.
  family.only(theirs, hidden_activation=name)
  return llama.describe(
    theirs,
    names,
    head,
    head_dim=family.size(theirs, "head_dim", 256),
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 16),
    mlp_bias=False,
    activation=family.ACTIVATIONS[name],
    norm_kind="rms_from_one",
    embedding_scale=None,
    tie_embeddings=family.flag(theirs, "tie_word_embeddings", True),
  )


GEMMA = llama.LLAMA._replace(
  name="gemma",
  architectures={"GemmaForCausalLM": "tokens"},
  describe=describe,
)
"""Llama with scaled embeddings and norms that store their scales minus 1."""
