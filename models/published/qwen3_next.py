"""Qwen3-Next without experts: Qwen Team, 2025; Yang et al., arXiv:2412.06464."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, mamba2, rotary
from models.published.family import Described, Layout, Row
from models.published.keys import because
from models.short_convolution import WIDTH

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(whole=0.25)}
_RECURRENT = "linear_attention"
_MECHANISMS = MappingProxyType(
  {
    llama.EXACT: AttentionConfig("dense"),
    _RECURRENT: AttentionConfig("gated_delta"),
  }
)


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; the config is that of a layer of exact attention."""
  # With another activation the two convolutions of transformers, with its fast
  # kernels and without, are not the same.
  family.only(theirs, hidden_act="silu", linear_conv_kernel_dim=WIDTH)
  experts = theirs.get("num_experts", 512)  # Its own default.
  if experts != 0 or isinstance(experts, bool):
    raise ValueError(
      "num_experts: expected 0, as only feed-forward layers without experts "
      f"are known here, got {experts!r}"
    )
  every = family.size(theirs, "full_attention_interval", 4)
  kinds = llama.layer_types(theirs, _RECURRENT, llama.last_of(every))
  overrides = {llama.EXACT: AroundConfig(), _RECURRENT: _recurrent(theirs)}
  return llama.describe(
    theirs,
    names,
    head,
    num_kv_heads=family.size(theirs, "num_key_value_heads", 2),
    head_dim=family.size(theirs, "head_dim", 256),
    mlp_bias=False,
    norm_kind="rms_from_one",
    query_key_norm="rms_from_one",
    output_gate="sigmoid",
    **rotary.choices(theirs, _ROTARY),
    decoder_attention=tuple(_MECHANISMS[kind] for kind in kinds),
    decoder_around=tuple(overrides[kind] for kind in kinds),
  )


def _recurrent(theirs: Mapping[str, Any]) -> AroundConfig:
  """The overrides of a recurrent layer."""
  heads = family.size(theirs, "linear_num_value_heads", 32)
  return AroundConfig(
    num_heads=heads,
    num_kv_heads=heads,
    num_qk_heads=family.size(theirs, "linear_num_key_heads", 16),
    head_dim=family.size(theirs, "linear_key_head_dim", 128),
    value_dim=family.size(theirs, "linear_value_head_dim", 128),
    attention_bias=False,
    query_key_norm="none",
    short_convolution=True,
    output_norm="rms",
    output_gate="silu",
    position="none",
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: Llama's, with other projections in every layer."""
  shared = [
    row for row in llama.LLAMA.rows(config) if "self_attn" not in row.theirs
  ]
  mechanisms = config.layers("decoder_attention")
  for i, layer in enumerate(config.decoder_configs):
    theirs, module = f"model.layers.{i}", f"decoder_{i}/self_attention"
    # Only the recurrent layers have convolutions, whichever mechanism is in them.
    if not layer.slot.short_convolution:
      shared += _exact_rows(f"{theirs}.self_attn", module, layer)
      continue
    shared += _recurrent_rows(f"{theirs}.linear_attn", module, layer)
    # Another mechanism may have variables of the same names.
    if mechanisms[i].name == _MECHANISMS[_RECURRENT].name:
      shared += _gate_rows(f"{theirs}.linear_attn", module, layer)
  return shared


def _exact_rows(theirs: str, module: str, layer: ModelConfig) -> list[Row]:
  """The rows of exact attention; each head has its query and then its gate."""
  layout = _grouped(layer.num_heads, (layer.query_dim,) * 2)
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


def _recurrent_rows(theirs: str, module: str, layer: ModelConfig) -> list[Row]:
  """The rows of the projections of a Gated DeltaNet, grouped by heads of keys."""
  module = f"params/{module}"
  groups = layer.slot.num_qk_heads or layer.num_heads
  key_dim, value_dim = layer.query_dim, layer.slot.value_dim or layer.query_dim
  keys, values = groups * key_dim, layer.num_heads * value_dim
  group_width = values // groups
  names = ("query", "key", "value")
  return [
    Row(
      f"{theirs}.in_proj_qkvz.weight",
      tuple(f"{module}/{name}/kernel" for name in (*names, "gate")),
      _grouped(groups, (key_dim, key_dim, group_width, group_width)),
    ),
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


def _gate_rows(theirs: str, module: str, layer: ModelConfig) -> list[Row]:
  """The rows of the gates of a Gated DeltaNet."""
  own = f"params/{module}/attention"
  groups = layer.slot.num_qk_heads or layer.num_heads
  return [
    Row(
      f"{theirs}.in_proj_ba.weight",
      (f"{own}/rate_kernel", f"{own}/step_kernel"),
      _grouped(groups, (layer.num_heads // groups,) * 2),
    ),
    Row(f"{theirs}.dt_bias", (f"{own}/step_bias",)),
    Row(f"{theirs}.A_log", (f"{own}/log_rate",)),
  ]


def _grouped(groups: int, widths: tuple[int, ...]) -> Layout:
  """The layout of several kernels in one Linear whose groups have these widths.

  It serves weights and biases.
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


QWEN3_NEXT = llama.LLAMA._replace(
  name="qwen3_next",
  architectures={"Qwen3NextForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=_ROTARY,
  without_effect={
    **because(
      "is of experts",
      "decoder_sparse_step moe_intermediate_size norm_topk_prob mlp_only_layers "
      "num_experts_per_tok output_router_logits shared_expert_intermediate_size",
    ),
    **because("is said by layer_types", "full_attention_interval"),
  },
  # Layers that predict several tokens at once, which transformers leaves out.
  unread=(*llama.LLAMA.unread, r"mtp\..*"),
)
"""Three layers of Gated DeltaNet for each layer of exact attention with a gate."""
