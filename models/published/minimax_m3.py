"""The text model of MiniMax-M3, whose indexer selects blocks of keys."""

from collections import ChainMap
from collections.abc import Collection, Mapping
import dataclasses
from typing import Annotated, Any, cast

from annotated_types import Ge
import numpy as np

from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.published import deepseek, experts, family, llama, rotary
from models.published.family import Description, Layout, Row
from models.published.keys import no_effect

_ROTARY: rotary.LayerTypes = {
  None: rotary.Rotary(default=5000000.0, default_share=1.0)
}
_SPARSE = "minimax_m3_sparse"
_OLDER = {
  "index_n_heads": "sparse_num_index_heads",
  "index_head_dim": "sparse_index_dim",
  "index_block_size": "sparse_block_size",
  "index_topk_blocks": "sparse_topk_blocks",
  "index_local_blocks": "sparse_local_block",
}
"""Key of `config.json` -> its name in the published `sparse_attention_config`."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  hf_config = _with_new_names(hf_config)
  epsilon = family.number(hf_config, "rms_norm_eps", 1e-6)
  positions = rotary.choices(hf_config, _ROTARY)
  width = family.size(hf_config, "head_dim", 128)
  rotated = int(width * positions["rotary_fraction"])
  index_dim = family.size(hf_config, "index_head_dim", 128)
  if rotated % 2 or not 0 < rotated <= index_dim:
    raise ValueError(
      "rope_parameters: expected partial_rotary_factor · head_dim to be even, above "
      f"0 and at most index_head_dim {index_dim}, got {rotated}"
    )
  options = {
    "block_size": family.size(hf_config, "index_block_size", 128),
    "top_k": family.size(hf_config, "index_topk_blocks", 16),
    "num_index_heads": family.size(hf_config, "index_n_heads", 4),
    "index_dim": index_dim,
    "local_blocks": family.value(
      hf_config, "index_local_blocks", Annotated[int, Ge(0)], 1
    ),
    "index_norm_epsilon": epsilon,
    "index_rotary_dim": rotated,
  }
  local, top = options["local_blocks"], options["top_k"]
  # In transformers, it is undefined which of too many local blocks are selected.
  if local > top:
    raise ValueError(
      f"index_local_blocks: expected at most index_topk_blocks {top}, got {local}"
    )
  kinds = llama.layer_types(hf_config, _SPARSE, lambda i: True)
  dense = AttentionConfig("dense")
  sparse = AttentionConfig("moba", options) if _SPARSE in kinds else dense
  fields: dict[str, Any] = {
    "num_experts": family.size(hf_config, "num_local_experts", 128),
    "experts_per_token": family.size(hf_config, "num_experts_per_tok", 4),
    "expert_features": family.size(hf_config, "intermediate_size", 3072),
    "shared_features": family.size(hf_config, "shared_intermediate_size", 3072),
    "routed_scale": family.positive(hf_config, "routed_scaling_factor", 2.0),
    "router_scores": "sigmoid",
    "selection_bias": True,
  }
  is_sparse = deepseek.sparse_layers(hf_config, lambda i: True)
  if any(is_sparse):
    fields["decoder_around"] = deepseek.overrides(is_sparse)
  else:
    fields = {}
  description = llama.describe(
    hf_config,
    names,
    head,
    num_kv_heads=family.size(hf_config, "num_key_value_heads", 4),
    head_dim=width,
    attention_bias=False,
    mlp_bias=False,
    activation="silu",
    norm_kind="rms_from_one",
    query_key_norm="rms_from_one",
    gate_slope=family.positive(hf_config, "swiglu_alpha", 1.702),
    gate_limit=family.positive(hf_config, "swiglu_limit", 7.0),
    gate_offset=1.0,
    decoder_attention=tuple(
      sparse if kind == _SPARSE else dense for kind in kinds
    ),
    **positions,
    **fields,
  )
  # `intermediate_size` is the width of an expert.
  size = family.size(hf_config, "dense_intermediate_size", 12288)
  config = dataclasses.replace(description.config, mlp_features=size)
  return description._replace(config=config)


def _with_new_names(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a config in which published keys have their new names."""
  key, kind = "sparse_attention_config", dict[str, Any]
  sparse = family.optional(hf_config, key, kind, {})
  new = {name: sparse[old] for name, old in _OLDER.items() if old in sparse}
  for name, kinds, chosen in (
    (
      "layer_types",
      (llama.EXACT, _SPARSE),
      sparse.get("sparse_attention_freq"),
    ),
    ("mlp_layer_types", ("dense", "sparse"), hf_config.get("moe_layer_freq")),
  ):
    if hf_config.get(name) is None and chosen is not None:
      if not isinstance(chosen, list):
        raise ValueError(
          f"{name}: expected one number per layer, got {chosen!r}"
        )
      new[name] = [kinds[bool(x)] for x in chosen]
  return ChainMap(new, cast(Any, hf_config))


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with gates and features in one tensor."""
  table = [row for row in llama.rows() if ".mlp." not in row.theirs]
  theirs, ours = "model.layers.{i}.mlp", "decoder_{i}/mlp"
  for name, own in (
    (theirs, ours),
    (f"{theirs}.shared_experts", f"{ours}/shared"),
  ):
    both = tuple(f"params/{own}/{x}/kernel" for x in ("gate", "hidden"))
    table += [
      Row(f"{name}.gate_up_proj.weight", both, _BOTH),
      *family.linear(f"{name}.down_proj", f"{own}/out"),
    ]
  both = tuple(f"params/{ours}/{x}_kernel" for x in ("gate", "hidden"))
  table += [
    *family.linear(f"{theirs}.gate", f"{ours}/router"),
    Row(f"{theirs}.experts.gate_up_proj", both, _BOTH),
    Row(
      f"{theirs}.experts.down_proj", (f"params/{ours}/out_kernel",), _TRANSPOSED
    ),
  ]
  table += experts.selection_rows(config)
  for i, mechanism in enumerate(config.layers("decoder_attention")):
    if mechanism.options.get("num_index_heads") and mechanism.name == "moba":
      table += _index_rows(i, mechanism.options["num_index_heads"])
  return table


def _index_rows(layer: int, heads: int) -> list[Row]:
  """Returns the rows of an indexer."""
  theirs = f"model.layers.{layer}.self_attn.indexer"
  ours = f"params/decoder_{layer}/self_attention/attention/index"
  return [
    Row(
      f"{theirs}.q_proj.weight",
      (f"{ours}_query_kernel",),
      deepseek.by_head(heads),
    ),
    Row(f"{theirs}.k_proj.weight", (f"{ours}_key_kernel",), family.TRANSPOSED),
    Row(f"{theirs}.q_norm.weight", (f"{ours}_query_scale",)),
    Row(f"{theirs}.k_norm.weight", (f"{ours}_key_scale",)),
  ]


_TRANSPOSED = Layout(
  lambda x, n: [x.swapaxes(-1, -2)], lambda xs: xs[0].swapaxes(-1, -2)
)
_BOTH = Layout(
  lambda x, n: [y.swapaxes(-1, -2) for y in np.split(x, n, axis=-2)],
  lambda xs: np.concatenate([x.swapaxes(-1, -2) for x in xs], axis=-2),
)
"""Gates and the features that they multiply, for one network or every expert."""


MINIMAX_M3 = llama.LLAMA._replace(
  name="minimax_m3_vl_text",
  architectures={"MiniMaxM3VLForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=_ROTARY,
  without_effect={
    **no_effect("follows from rope_parameters", "rotary_dim"),
    **no_effect("follows from swiglu_alpha", "hidden_act"),
    **no_effect("affects only training", "router_jitter_noise"),
    **no_effect("selects outputs other than logits", "output_router_logits"),
  },
)
"""Decoders with exact attention in some layers and selected blocks in the others."""
