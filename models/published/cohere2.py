"""Command R7B and Command A: Cohere, arXiv:2504.00698."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, rotary
from models.published.family import Description, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; only layers with a window have positions."""
  heads = family.size(hf_config, "num_attention_heads")
  family.only(
    hf_config,
    "hidden_size / num_attention_heads",
    head_dim=family.size(hf_config, "hidden_size") // heads,
  )
  family.only(
    hf_config,
    # The first files have keys that no version of transformers reads.
    use_qk_norm=False,
    use_parallel_block=True,
    use_gated_activation=True,
    use_parallel_embedding=False,
    position_embedding_type="rope_gptj",
    order_of_interleaved_layers="local_attn_first",
    rotary_pct=1.0,
  )
  every = family.size(hf_config, "sliding_window_pattern", 4)
  kinds = llama.layer_types(hf_config, llama.NEAR, llama.is_last_of(every))
  overrides = {
    llama.NEAR: AroundConfig(),
    llama.EXACT: AroundConfig(position="none"),
  }
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=None,
    mlp_bias=False,
    parallel=True,
    shared_norm=True,
    norm_kind="layer_without_bias",
    norm_epsilon=family.number(hf_config, "layer_norm_eps", 1e-5),
    logit_scale=family.number(hf_config, "logit_scale", 0.0625),
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    **rotary.choices(hf_config),
    decoder_attention=llama.windows(hf_config, kinds),
    decoder_around=tuple(overrides[kind] for kind in kinds),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with adjacent rotary pairs."""
  table, width = [], config.query_dim
  pairs = rotary.adjacent_pairs(width, width)
  for row in llama.LLAMA.rows(config):
    _, _, name = row.theirs.rpartition("self_attn.")
    if name.startswith(("q_proj", "k_proj")):
      row = row._replace(layout=pairs)
    table.append(row)
  return table


COHERE2 = llama.LLAMA._replace(
  name="cohere2",
  architectures={"Cohere2ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  without_effect={
    **no_effect(
      "follows from layer_types", "sliding_window_pattern layer_switch"
    ),
    **no_effect("follows from tie_word_embeddings", "use_embedding_sharing"),
  },
)
"""Parallel sub-layers with one norm, and no positions in layers without a window."""
