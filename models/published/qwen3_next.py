"""Qwen3-Next and Qwen3.5: Qwen Team, 2025 and 2026; Yang et al., arXiv:2412.06464."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
from types import MappingProxyType
from typing import Any

import numpy as np

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import experts, family, llama, mamba2, rotary
from models.published.family import Description, Layout, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default_share=0.25)}
# For text, all sections of the multimodal positions are equal.
_TEXT_ROTARY: rotary.LayerTypes = {
  None: rotary.Rotary(
    default_share=0.25, ignored=("mrope_section", "mrope_interleaved")
  )
}
_RECURRENT = "linear_attention"
_MECHANISMS = MappingProxyType(
  {
    llama.EXACT: AttentionConfig("dense"),
    _RECURRENT: AttentionConfig("gated_delta"),
  }
)


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for Qwen3-Next."""
  number = experts.count(hf_config, 512)
  fields, layers = experts.qwen_experts(
    hf_config, number, 10, 512, normalize=True
  )
  shared = _shared_fields(hf_config) if number else {}
  return hybrid(hf_config, names, head, _ROTARY, layers, **fields, **shared)


def describe_dense(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for Qwen3.5 without experts."""
  heads = family.optional_size(hf_config, "num_key_value_heads", 4)
  return hybrid(hf_config, names, head, _TEXT_ROTARY, num_kv_heads=heads)


def describe_sparse(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for Qwen3.5 with experts in every layer."""
  family.only(hf_config, decoder_sparse_step=1, mlp_only_layers=[])
  number = experts.count(hf_config, 256, least=1)
  fields, _ = experts.qwen_experts(hf_config, number, 8, 512, normalize=None)
  fields["mlp_features"] = fields["expert_features"]
  fields |= _shared_fields(hf_config)
  return hybrid(hf_config, names, head, _TEXT_ROTARY, **fields)


def _shared_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of the shared expert."""
  width = family.size(hf_config, "shared_expert_intermediate_size", 512)
  return {"shared_features": width, "shared_gate": True}


def hybrid(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  types: rotary.LayerTypes,
  layers: Sequence[int | None] = (),
  **others: Any,
) -> Description:
  """Describes a decoder; the model's config describes a layer of exact attention.

  Args:
    hf_config: `config.json`.
    names: names of the tensors.
    head: our name of the head.
    types: rotary positions of the family.
    layers: override of the number of experts per layer; empty means none.
    **others: config fields in which a family differs.
  """
  # With another activation, the two convolutions of transformers (with and without
  # fast kernels) differ.
  family.only(hf_config, hidden_act="silu", linear_conv_kernel_dim=WIDTH)
  family.only(hf_config, attn_output_gate=True)
  every = family.size(hf_config, "full_attention_interval", 4)
  kinds = llama.layer_types(hf_config, _RECURRENT, llama.is_last_of(every))
  by_kind = {llama.EXACT: AroundConfig(), _RECURRENT: _recurrent(hf_config)}
  choices: dict[str, Any] = {
    "num_kv_heads": family.optional_size(hf_config, "num_key_value_heads", 2),
    "head_dim": family.size(hf_config, "head_dim", 256),
    "mlp_bias": False,
    "norm_kind": "rms_from_one",
    "query_key_norm": "rms_from_one",
    "output_gate": "sigmoid",
    "decoder_attention": tuple(_MECHANISMS[kind] for kind in kinds),
    "decoder_around": tuple(
      dataclasses.replace(by_kind[kind], num_experts=number)
      for kind, number in zip(kinds, layers or [None] * len(kinds), strict=True)
    ),
    **rotary.choices(hf_config, types),
  }
  return llama.describe(hf_config, names, head, **choices | others)


def _recurrent(hf_config: Mapping[str, Any]) -> AroundConfig:
  """Returns the overrides of a recurrent layer."""
  heads = family.size(hf_config, "linear_num_value_heads", 32)
  groups = family.size(hf_config, "linear_num_key_heads", 16)
  source = "linear_num_value_heads"
  family.check_divisor("linear_num_key_heads", groups, source, heads)
  return delta_layer(
    num_heads=heads,
    num_qk_heads=groups,
    head_dim=family.size(hf_config, "linear_key_head_dim", 128),
    value_dim=family.size(hf_config, "linear_value_head_dim", 128),
  )


def delta_layer(num_heads: int, **others: Any) -> AroundConfig:
  """Returns the overrides of a Gated DeltaNet layer in a model of exact attention.

  Args:
    num_heads: number of value heads.
    **others: config fields in which a family differs.
  """
  return AroundConfig(
    num_heads=num_heads,
    num_kv_heads=num_heads,
    attention_bias=False,
    query_key_norm="none",
    short_convolution=True,
    output_norm="rms",
    output_gate="silu",
    position="none",
    **others,
  )


def rows(config: ModelConfig, is_split: bool = False) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with other projections in every layer.

  Args:
    config: config of the model.
    is_split: whether the projections of Gated DeltaNet are separate tensors.
  """
  shared = [
    row for row in llama.LLAMA.rows(config) if "self_attn" not in row.theirs
  ]
  shared += experts.rows(config) + experts.shared_rows()
  mechanisms = config.layers("decoder_attention")
  for i, layer in enumerate(config.decoder_configs):
    theirs, module = f"model.layers.{i}", f"decoder_{i}/self_attention"
    # Only recurrent layers have convolutions, whatever their mechanism.
    if not layer.slot.short_convolution:
      shared += _exact_rows(f"{theirs}.self_attn", module, layer)
      continue
    theirs = f"{theirs}.linear_attn"
    shared += _recurrent_rows(theirs, module, layer, is_split)
    # Another mechanism may have variables of the same names.
    if mechanisms[i].name == _MECHANISMS[_RECURRENT].name:
      shared += _gate_rows(theirs, module, layer, is_split)
  return shared


def _exact_rows(theirs: str, module: str, layer: ModelConfig) -> list[Row]:
  """Returns the rows of exact attention; each head has its query, then its gate."""
  layout = grouped_layout(layer.num_heads, (layer.query_dim,) * 2)
  return [
    *(
      Row(
        f"{theirs}.q_proj.{their_name}",
        (f"params/{module}/query/{name}", f"params/{module}/gate/{name}"),
        layout,
      )
      for their_name, name in (("weight", "kernel"), ("bias", "bias"))
    ),
    *family.linear(f"{theirs}.k_proj", f"{module}/key"),
    *family.linear(f"{theirs}.v_proj", f"{module}/value"),
    *family.linear(f"{theirs}.o_proj", f"{module}/out"),
    *family.norm(f"{theirs}.q_norm", f"{module}/query_norm"),
    *family.norm(f"{theirs}.k_norm", f"{module}/key_norm"),
  ]


def _recurrent_rows(
  theirs: str, module: str, layer: ModelConfig, is_split: bool
) -> list[Row]:
  """Returns the rows of the projections of a Gated DeltaNet.

  They are one tensor, grouped by key heads, or several tensors.
  """
  module = f"params/{module}"
  groups = layer.slot.num_qk_heads or layer.num_heads
  key_dim, value_dim = layer.query_dim, layer.slot.value_dim or layer.query_dim
  keys, values = groups * key_dim, layer.num_heads * value_dim
  group_width = values // groups
  names = ("query", "key", "value")
  kernels = tuple(f"{module}/{name}/kernel" for name in (*names, "gate"))
  if is_split:
    projections = [
      Row(
        f"{theirs}.in_proj_qkv.weight",
        kernels[:3],
        grouped_layout(1, (keys, keys, values)),
      ),
      Row(f"{theirs}.in_proj_z.weight", kernels[3:], family.TRANSPOSED),
    ]
  else:
    widths = (key_dim, key_dim, group_width, group_width)
    layout = grouped_layout(groups, widths)
    projections = [Row(f"{theirs}.in_proj_qkvz.weight", kernels, layout)]
  return [
    *projections,
    Row(
      f"{theirs}.conv1d.weight",
      tuple(f"{module}/{name}_short_convolution/kernel" for name in names),
      mamba2.filters((keys, keys, values)),
    ),
    Row(f"{theirs}.norm.weight", (f"{module}/out_norm/scale",)),
    Row(
      f"{theirs}.out_proj.weight", (f"{module}/out/kernel",), family.TRANSPOSED
    ),
  ]


def _gate_rows(
  theirs: str, module: str, layer: ModelConfig, is_split: bool
) -> list[Row]:
  """Returns the rows of the gates of a Gated DeltaNet."""
  own = f"params/{module}/attention"
  groups = layer.slot.num_qk_heads or layer.num_heads
  kernels = (f"{own}/rate_kernel", f"{own}/step_kernel")
  layout = grouped_layout(groups, (layer.num_heads // groups,) * 2)
  projections = [Row(f"{theirs}.in_proj_ba.weight", kernels, layout)]
  if is_split:
    projections = [
      Row(f"{theirs}.in_proj_{name}.weight", (kernel,), family.TRANSPOSED)
      for name, kernel in zip("ba", kernels, strict=True)
    ]
  return [
    *projections,
    Row(f"{theirs}.dt_bias", (f"{own}/step_bias",)),
    Row(f"{theirs}.A_log", (f"{own}/log_rate",)),
  ]


def grouped_layout(groups: int, widths: tuple[int, ...]) -> Layout:
  """Returns the layout of several kernels in one Linear whose groups have these widths.

  The layout fits weights and biases.
  """
  ends = np.cumsum(widths)[:-1]

  def read(x, n):
    del n
    parts = np.split(x.reshape(groups, sum(widths), *x.shape[1:]), ends, axis=1)
    return [part.reshape(-1, *x.shape[1:]).T for part in parts]

  def write(xs):
    parts = [x.T.reshape(groups, -1, *x.T.shape[1:]) for x in xs]
    return np.concatenate(parts, axis=1).reshape(-1, *xs[0].T.shape[1:])

  return Layout(read, write)


_WITHOUT_EFFECT = {
  **no_effect("selects outputs other than logits", "output_router_logits"),
  **no_effect("follows from layer_types", "full_attention_interval"),
  **no_effect(
    "selects an implementation of the same function", "mamba_ssm_dtype"
  ),
  **no_effect(
    "belongs to multi-token prediction layers",
    "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
  ),
}

QWEN3_NEXT = llama.LLAMA._replace(
  name="qwen3_next",
  architectures={"Qwen3NextForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=_ROTARY,
  without_effect={
    **_WITHOUT_EFFECT,
    # They are read but have no effect if num_experts is 0.
    **no_effect(
      "belongs to experts",
      "decoder_sparse_step moe_intermediate_size norm_topk_prob mlp_only_layers "
      "num_experts_per_tok shared_expert_intermediate_size",
    ),
  },
  # Layers that predict several tokens at once, which transformers leaves out.
  unread=(*llama.LLAMA.unread, r"mtp\..*"),
)
"""Three layers of Gated DeltaNet for each layer of exact attention with a gate."""

QWEN3_5 = QWEN3_NEXT._replace(
  name="qwen3_5_text",
  architectures={"Qwen3_5ForCausalLM": "tokens"},
  describe=describe_dense,
  rows=functools.partial(rows, is_split=True),
  rotary=_TEXT_ROTARY,
  without_effect=_WITHOUT_EFFECT,
)
"""Qwen3-Next without experts, with separate projections."""

QWEN3_5_MOE = QWEN3_5._replace(
  name="qwen3_5_moe_text",
  architectures={"Qwen3_5MoeForCausalLM": "tokens"},
  describe=describe_sparse,
  without_effect={
    **_WITHOUT_EFFECT,
    **no_effect("belongs to layers without experts", "intermediate_size"),
  },
)
"""Qwen3.5 with experts in every layer."""
