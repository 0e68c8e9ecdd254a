"""Command R7B and Command A: Cohere, arXiv:2504.00698."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, rotary
from models.published.family import Described, Row
from models.published.keys import because


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; only layers with a window have positions."""
  heads = family.size(theirs, "num_attention_heads")
  family.only(
    theirs,
    head_dim=family.size(theirs, "hidden_size") // heads,
    # The first files say what no version of transformers reads.
    use_qk_norm=False,
    use_parallel_block=True,
    use_gated_activation=True,
    use_parallel_embedding=False,
    position_embedding_type="rope_gptj",
    order_of_interleaved_layers="local_attn_first",
    rotary_pct=1.0,
  )
  every = family.size(theirs, "sliding_window_pattern", 4)
  kinds = llama.layer_types(theirs, llama.NEAR, llama.last_of(every))
  overrides = {
    llama.NEAR: AroundConfig(),
    llama.EXACT: AroundConfig(position="none"),
  }
  return llama.describe(
    theirs,
    names,
    head,
    head_dim=None,
    mlp_bias=False,
    parallel=True,
    shared_norm=True,
    norm_kind="layer_without_bias",
    norm_epsilon=family.number(theirs, "layer_norm_eps", 1e-5),
    logit_scale=family.number(theirs, "logit_scale", 0.0625),
    tie_embeddings=family.flag(theirs, "tie_word_embeddings", True),
    **rotary.choices(theirs),
    decoder_attention=llama.windows(theirs, kinds),
    decoder_around=tuple(overrides[kind] for kind in kinds),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: Llama's, with rotated pairs of adjacent features."""
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
    **because("is said by layer_types", "sliding_window_pattern layer_switch"),
    **because("is said by tie_word_embeddings", "use_embedding_sharing"),
  },
)
"""Parallel sub-layers with one norm, and no positions in layers without a window."""
