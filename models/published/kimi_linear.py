"""Kimi Linear: Kimi Team, arXiv:2510.26692."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import deepseek, experts, family, llama, mamba2
from models.published.family import TRANSPOSED, Description, Layout, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH
from settings.fields import Whole

_RECURRENT = "linear_attention"


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; the model's config describes a KDA layer."""
  kinds, old = _layers(hf_config), _first_format_keys(hf_config)
  is_old, delta = bool(old), old or hf_config
  prefix = "" if is_old else "linear_"
  convolution = "short_conv_kernel_size" if is_old else "linear_conv_kernel_dim"
  family.only(delta, **{convolution: WIDTH})
  family.only(
    hf_config,
    hidden_act="silu",
    mla_use_nope=True,
    moe_router_activation_func="sigmoid",
    use_grouped_topk=True,
    moe_layer_freq=1,
  )
  width = family.size(delta, f"{prefix}head_dim", 128)
  exact, latent = _latent_layer(hf_config)
  mechanisms = {
    llama.EXACT: latent,
    _RECURRENT: AttentionConfig("kimi_delta", {"rank": width}),
  }
  first = family.value(hf_config, "first_k_dense_replace", Whole, 1)
  is_sparse = deepseek.sparse_layers(hf_config, lambda i: i >= first)
  overrides = tuple(
    AroundConfig(
      **(exact if kind == llama.EXACT else {}), num_experts=None if x else 0
    )
    for kind, x in zip(kinds, is_sparse, strict=True)
  )
  return llama.describe(
    hf_config,
    names,
    head,
    length="model_max_length",
    num_heads=family.size(delta, f"{prefix}num_heads", 32),
    num_kv_heads=None,
    head_dim=width,
    attention_bias=False,
    mlp_bias=False,
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    tie_embeddings=False,
    position="none",
    short_convolution=True,
    output_norm="rms",
    output_gate="sigmoid",
    output_gate_rank=width,
    decoder_attention=tuple(mechanisms[kind] for kind in kinds),
    decoder_around=overrides,
    **_experts(hf_config, any(is_sparse)),
  )


def _first_format_keys(hf_config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of KDA in the first files; empty for later files."""
  if hf_config.get("linear_attn_config") is None:
    return {}
  return family.value(hf_config, "linear_attn_config", dict[str, Any])


def _layers(hf_config: Mapping[str, Any]) -> list[str]:
  """Returns the type of every layer; the first files number layers from 1."""
  old = _first_format_keys(hf_config)
  layers = family.value(old, "full_attn_layers", list[int], ())
  exact = {layer - 1 for layer in layers}
  has_lists = {"full_attn_layers", "kda_layers"} <= old.keys()
  return [
    *llama.layer_types(
      hf_config,
      _RECURRENT,
      lambda i: i in exact if has_lists else i > 0 and i % 4 == 0,
    )
  ]


def _latent_layer(
  hf_config: Mapping[str, Any],
) -> tuple[dict[str, Any], AttentionConfig]:
  """Returns the overrides of a latent-attention layer, and its mechanism."""
  heads = family.size(hf_config, "num_attention_heads")
  family.only(hf_config, "num_attention_heads", num_key_value_heads=heads)
  rank = family.size(hf_config, "kv_lora_rank", 512)
  shared = family.size(hf_config, "qk_rope_head_dim", 64)
  has_bias = family.flag(hf_config, "attention_bias", False)
  fields = {
    "num_heads": heads,
    "head_dim": shared + family.size(hf_config, "qk_nope_head_dim", 128),
    "value_dim": family.size(hf_config, "v_head_dim", 128),
    "query_rank": family.optional_size(hf_config, "q_lora_rank"),
    "latent_rank": rank,
    "shared_key_dim": shared,
    "attention_bias": has_bias,
    "short_convolution": False,
    "output_norm": "none",
    "output_gate": "none",
  }
  return fields, deepseek.latent(rank, shared, has_bias)


def _experts(hf_config: Mapping[str, Any], has_any: bool) -> dict[str, Any]:
  """The fields of layers with experts."""
  width = family.size(hf_config, "moe_intermediate_size", 1024)
  fields = {
    "num_experts": experts.count(hf_config, 256, least=1),
    "experts_per_token": family.size(hf_config, "num_experts_per_token", 8),
    "expert_features": width,
    "shared_features": width * family.size(hf_config, "num_shared_experts", 1),
    "router_scores": "sigmoid",
    "selection_bias": True,
    "expert_groups": family.size(hf_config, "num_expert_group", 1),
    "groups_per_token": family.size(hf_config, "topk_group", 1),
    "normalize_weights": family.flag(hf_config, "moe_renormalize", True),
    "routed_scale": family.positive(hf_config, "routed_scaling_factor", 2.446),
  }
  return fields if has_any else {}


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  mlp = "model.layers.{i}.block_sparse_moe"
  table = [row for row in llama.rows() if "self_attn" not in row.theirs]
  table = [
    row._replace(theirs=row.theirs.replace("mlp", "block_sparse_moe"))
    for row in table
  ]
  table += experts.rows(config, mlp, experts.MIXTRAL_KERNELS)
  table += experts.shared_rows(f"{mlp}.shared_experts")
  table += experts.selection_rows(config, mlp)
  mechanisms = config.layers("decoder_attention")
  for i, layer in enumerate(config.decoder_configs):
    theirs, module = (
      f"model.layers.{i}.self_attn",
      f"decoder_{i}/self_attention",
    )
    name = mechanisms[i].name
    if layer.slot.short_convolution:
      table += _recurrent_rows(theirs, module, layer, name)
    else:
      is_own = name == "latent"
      table += deepseek.latent_rows(theirs, module, layer, is_own, rotated=0)
  return table


def _recurrent_rows(
  theirs: str, module: str, layer: ModelConfig, mechanism: str
) -> list[Row]:
  """The rows of Kimi Delta Attention."""
  heads, own = layer.num_heads, f"params/{module}/attention"
  table = family.norm(f"{theirs}.o_norm", f"{module}/out_norm")
  modules = {"g_a": "gate_down", "g_b": "gate", "o": "out"}
  for old, new in {"q": "query", "k": "key", "v": "value"}.items():
    kernel = f"params/{module}/{new}_short_convolution/kernel"
    filters = mamba2.filters((heads * layer.query_dim,))
    table.append(Row(f"{theirs}.{old}_conv1d.weight", (kernel,), filters))
    modules[old] = new
  for old, new in modules.items():
    table += family.linear(f"{theirs}.{old}_proj", f"{module}/{new}")
  if mechanism != "kimi_delta":
    return table
  layouts = {
    "b_proj.weight": ("rate_kernel", TRANSPOSED),
    "f_a_proj.weight": ("step_down", TRANSPOSED),
    "f_b_proj.weight": ("step_up", deepseek.by_head(heads)),
    "dt_bias": ("step_bias", _reshaped_layout((heads, -1), (-1,))),
    "A_log": ("log_rate", _reshaped_layout((-1,), (1, 1, -1, 1))),
  }
  return table + [
    Row(f"{theirs}.{name}", (f"{own}/{ours}",), layout)
    for name, (ours, layout) in layouts.items()
  ]


def _reshaped_layout(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Layout:
  """Returns the layout that reshapes a tensor."""
  return Layout(
    lambda x, n: [x.reshape(ours)], lambda xs: xs[0].reshape(theirs)
  )


KIMI_LINEAR = llama.LLAMA._replace(
  name="kimi_linear",
  architectures={"KimiLinearForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=None,
  # transformers names layers without experts like those with experts.
  renamed=tuple(
    (f".mlp.{x}_proj.weight", f".block_sparse_moe.{x}_proj.weight")
    for x in ("gate", "up", "down")
  ),
  without_effect={
    **no_effect("selects outputs other than logits", "output_router_logits"),
    **no_effect("is not read by the model class", "tie_word_embeddings"),
    **no_effect(
      "belongs to positions, which the model lacks",
      "rope_theta rope_scaling rope_parameters",
    ),
    **no_effect("follows from other keys", "head_dim qk_head_dim"),
    **no_effect("follows from mlp_layer_types", "first_k_dense_replace"),
    **no_effect(
      "belongs to layers that transformers omits", "num_nextn_predict_layers"
    ),
  },
)
"""Decoders with KDA and latent-attention layers, without position encodings."""
