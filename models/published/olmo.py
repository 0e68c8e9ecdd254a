"""OLMo 2 and OLMo 3: OLMo Team, arXiv:2501.00656 and arXiv:2512.13961."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, llama, rotary
from models.published.family import Described


def describe(
  theirs: Mapping[str, Any],
  names: Collection[str],
  head: str,
  **others: Any,
) -> Described:
  """Implements `Family.describe`; `others` are the fields in which a family differs."""
  return llama.describe(
    theirs,
    names,
    head,
    mlp_bias=False,
    norm="output",
    query_key_norm="rms_joint",
    norm_epsilon=family.number(theirs, "rms_norm_eps", 1e-5),
    **others,
  )


def describe_with_windows(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe` for OLMo 3: three of four layers have a window."""
  kinds = llama.layer_types(theirs, llama.NEAR, llama.last_of(4))
  return describe(
    theirs,
    names,
    head,
    decoder_attention=llama.windows(theirs, kinds),
    decoder_around=rotary.overrides(theirs, _TYPES, kinds),
  )


# Versions 4 and 5 have different defaults, so θ has to be in the file.
_TYPES: rotary.LayerTypes = {
  llama.EXACT: rotary.Rotary(default=None),
  llama.NEAR: rotary.Rotary(default=None, scaled=False),
}


_NORMS = {
  "post_attention_layernorm": "self_attention_norm",
  "post_feedforward_layernorm": "mlp_norm",
}

OLMO2 = llama.LLAMA._replace(
  name="olmo2",
  architectures={"Olmo2ForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: llama.rows(_NORMS),
  rotary={None: rotary.Rotary(type_key="type")},
)
"""Norms of sub-layer outputs, and of queries and keys over all heads together."""

OLMO3 = OLMO2._replace(
  name="olmo3",
  architectures={"Olmo3ForCausalLM": "tokens"},
  describe=describe_with_windows,
  rotary=_TYPES,
)
"""OLMo 2 with a window in three of four layers."""
