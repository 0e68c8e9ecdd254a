"""Phi-3 and Phi-4: Abdin et al., arXiv:2404.14219 and arXiv:2412.08905."""

from collections.abc import Collection, Mapping
from typing import Any

from models.config import ModelConfig
from models.published import family, llama, mistral, rotary
from models.published.family import Description, Row
from models.published.keys import no_effect

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default_share=1.0)}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  rotary.check_unscaled(hf_config)
  return llama.describe(
    hf_config,
    names,
    head,
    attention_bias=False,
    mlp_bias=False,
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    **rotary.choices(hf_config, _ROTARY),
    decoder_attention=mistral.mechanism(hf_config, None),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with five Linears fused into two."""
  theirs, ours = "model.layers.{i}", "params/decoder_{i}"
  queries, keys = (
    heads * config.query_dim for heads in (config.num_heads, config.kv_heads)
  )
  fused = (
    ("self_attn.qkv_proj", "self_attention", ("query", "key", "value")),
    ("mlp.gate_up_proj", "mlp", ("gate", "hidden")),
  )
  widths = ((queries, keys, keys), (config.mlp_features,) * 2)
  replaced = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
  table = llama.LLAMA.rows(config)
  return [
    *(row for row in table if row.theirs.split(".")[-2] not in replaced),
    *(
      Row(
        f"{theirs}.{name}.weight",
        tuple(f"{ours}/{part}/{one}/kernel" for one in kernels),
        family.linear_segments(sizes),
      )
      for (name, part, kernels), sizes in zip(fused, widths, strict=True)
    ),
  ]


PHI3 = llama.LLAMA._replace(
  name="phi3",
  architectures={"Phi3ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=_ROTARY,
  without_effect=no_effect(
    "belongs to LongRoPE, which is not supported",
    "original_max_position_embeddings",
  ),
)
"""Llama with fused projections, and a window of preceding keys if it has one."""
