"""The text model of Gemma 3: Gemma Team, arXiv:2503.19786."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import family, gemma2, llama, rotary
from models.published.family import Description
from models.published.keys import no_effect

_TYPES: rotary.LayerTypes = {
  llama.EXACT: rotary.Rotary(default=1e6),
  llama.NEAR: rotary.Rotary(theta=("rope_local_base_freq",), scaled=False),
}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; layers with a window have separate wavelengths."""
  # Unlike Gemma 2, no layer uses the soft cap of attention logits.
  family.only(hf_config, attn_logit_softcapping=None)
  every = {
    family.size(hf_config, key, 6)
    for key in ("sliding_window_pattern", "_sliding_window_pattern")
    if key in hf_config
  } or {6}
  if len(every) > 1:
    raise ValueError(f"sliding_window_pattern: expected one value, got {every}")
  kinds = llama.layer_types(
    hf_config, llama.NEAR, llama.is_last_of(every.pop())
  )
  return gemma2.describe(
    hf_config,
    names,
    head,
    query_key_norm="rms_from_one",
    logit_soft_cap=gemma2.cap(hf_config, "final_logit_softcapping", None),
    decoder_attention=llama.windows(hf_config, kinds),
    decoder_around=rotary.overrides(hf_config, _TYPES, kinds),
  )


GEMMA3 = gemma2.GEMMA2._replace(
  name="gemma3_text",
  architectures={"Gemma3ForCausalLM": "tokens"},
  describe=describe,
  rotary=_TYPES,
  without_effect={
    **gemma2.GEMMA2.without_effect,
    **no_effect(
      "follows from layer_types",
      "sliding_window_pattern _sliding_window_pattern",
    ),
  },
)
"""Gemma 2 with norms of queries and keys, no caps, and five windows in six layers."""
