"""Nemotron-H, arXiv:2504.03624, and Nemotron 3, arXiv:2512.20848: NVIDIA."""

from collections.abc import Collection, Mapping, Sequence
import reprlib
from types import MappingProxyType
from typing import Any

from models import nested
from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import experts, family, mamba2
from models.published.family import Description, Family, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH

_EXACT, _RECURRENT, _SPARSE, _DENSE = _KINDS = (
  "full_attention",
  "linear_attention",
  "moe",
  "mlp",
)
_SYMBOLS = MappingProxyType(dict(zip("*ME-", _KINDS, strict=True)))
_OLD = MappingProxyType({"attention": _EXACT, "mamba": _RECURRENT})
_KERNELS = MappingProxyType({"up_proj": "hidden", "down_proj": "out"})


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; the model's config describes layers of all kinds."""
  del names
  family.only(hf_config, conv_kernel=WIDTH, mamba_hidden_act="silu")
  kinds = _layers(hf_config)
  heads = family.size(hf_config, "num_attention_heads", 32)
  width = family.size(hf_config, "head_dim", 128)
  family.only(hf_config, attention_head_dim=width)
  sparse = _experts(hf_config) if _SPARSE in kinds else {}
  override = {
    _EXACT: AroundConfig(mlp_features=0),
    _RECURRENT: _mixer(hf_config),
    _SPARSE: AroundConfig(self_attention=False),
    _DENSE: AroundConfig(self_attention=False, num_experts=0),
  }
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=len(kinds),
    num_heads=heads,
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 8)
    or heads,
    head_dim=width,
    features=family.size(hf_config, "hidden_size", 4096),
    mlp_features=family.size(hf_config, "intermediate_size", 21504),
    mlp_bias=family.flag(hf_config, "mlp_bias", False),
    activation=family.activation(hf_config, "mlp_hidden_act", "relu2"),
    position="none",
    norm="pre",
    norm_kind="rms",
    norm_epsilon=family.number(hf_config, "layer_norm_epsilon", 1e-5),
    embedding_scale=1.0,
    tie_embeddings=False,
    head=head,
    decoder_attention=tuple(_mechanism(hf_config, kind) for kind in kinds),
    decoder_around=tuple(override[kind] for kind in kinds),
    **sparse,
  )
  vocab_size = family.size(hf_config, "vocab_size", 131072)
  return Description(config, vocab_size, vocab_size, mamba2.LONGEST)


def _layers(hf_config: Mapping[str, Any]) -> Sequence[str]:
  """Returns the kind of every layer, from a list or, in the first files, a string."""
  name, pattern = "layers_block_type", "hybrid_override_pattern"
  if hf_config.get(name) is None and pattern in hf_config:
    name = pattern
    given = [*family.value(hf_config, pattern, str)]
    kinds = [_SYMBOLS.get(kind, kind) for kind in given]
  else:
    default = [_RECURRENT, _SPARSE, _EXACT, _DENSE]
    given = family.value(hf_config, name, list[str], default)
    kinds = [_OLD.get(kind, kind) for kind in given]
  if not kinds or not {*kinds} <= {*_KINDS}:
    known = ", ".join(_SYMBOLS if name == pattern else _KINDS)
    got = reprlib.repr(given)
    raise ValueError(f"{name}: expected entries among {known}, got {got}")
  return kinds


def _mechanism(hf_config: Mapping[str, Any], kind: str) -> AttentionConfig:
  """Returns the mechanism of a layer, which a layer without attention ignores."""
  # transformers clips Δ at the minimum that other models only use to initialise it.
  least = family.number(hf_config, "time_step_min", 0.001)
  if kind != _RECURRENT:
    return AttentionConfig("dense")
  has_bias = family.flag(hf_config, "use_bias", False)
  options = {"projection_bias": has_bias, "min_step": least}
  return AttentionConfig("mamba2", options)


def _mixer(hf_config: Mapping[str, Any]) -> AroundConfig:
  """Returns the overrides of a Mamba-2 layer."""
  heads = family.size(hf_config, "mamba_num_heads", 128)
  groups = family.size(hf_config, "n_groups", 8)
  family.check_divisor("n_groups", groups, "mamba_num_heads", heads)
  fields = mamba2.mixer(
    heads,
    groups,
    mlp_features=0,
    head_dim=family.size(hf_config, "ssm_state_size", 128),
    value_dim=family.size(hf_config, "mamba_head_dim", 64),
    attention_bias=family.flag(hf_config, "use_bias", False),
    short_convolution_bias=family.flag(hf_config, "use_conv_bias", True),
  )
  return AroundConfig(**fields)


def _experts(hf_config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of layers with experts, which have no biases here."""
  family.only(hf_config, mlp_bias=False)
  return {
    "num_experts": family.size(hf_config, "n_routed_experts", 8),
    "experts_per_token": family.size(hf_config, "num_experts_per_tok", 2),
    "expert_features": family.size(hf_config, "moe_intermediate_size", 7688),
    "expert_latent_features": family.optional_size(
      hf_config, "moe_latent_size"
    ),
    "shared_features": family.size(
      hf_config, "moe_shared_expert_intermediate_size", 7688
    ),
    "router_scores": "sigmoid",
    "selection_bias": True,
    "expert_groups": family.size(hf_config, "n_group", 1),
    "groups_per_token": family.size(hf_config, "topk_group", 1),
    "normalize_weights": family.flag(hf_config, "norm_topk_prob", True),
    "routed_scale": family.positive(hf_config, "routed_scaling_factor", 1.0),
  }


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`; a layer has variables only for the rows of its kind."""
  theirs, ours = "backbone.layers.{i}", "decoder_{i}"
  table = family.table("backbone.embeddings", "target_embedding")
  for name in ("self_attention", "mlp"):
    table += family.norm(f"{theirs}.norm", f"{ours}/{name}_norm")
  theirs = f"{theirs}.mixer"
  for old, new in _KERNELS.items():
    table += family.linear(f"{theirs}.{old}", f"{ours}/mlp/{new}")
  for old, new in (("fc1", "down"), ("fc2", "up")):
    table += family.linear(
      f"{theirs}.{old}_latent_proj", f"{ours}/mlp/latent_{new}"
    )
  table += experts.rows(config, theirs, _KERNELS)
  table += experts.selection_rows(config, theirs)
  table += experts.shared_rows(f"{theirs}.shared_experts")
  mechanisms = config.layers("decoder_attention")
  for i, layer in enumerate(config.decoder_configs):
    module, name = f"decoder_{i}/self_attention", theirs.format(i=i)
    if layer.slot.short_convolution:
      is_own = mechanisms[i].name == "mamba2"
      table += mamba2.mixer_rows(name, module, layer, is_own)
      continue
    for part in ("query", "key", "value", "out"):
      table += family.linear(f"{name}.{part[0]}_proj", f"{module}/{part}")
  table += family.norm("backbone.norm_f", "decoder_norm")
  return table + family.table("lm_head", "output_embedding")


NEMOTRON_H = Family(
  name="nemotron_h",
  architectures={"NemotronHForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  prefix="backbone.",
  parts=("embeddings", "layers", "norm_f"),
  unread=(r"mtp\..*",),
  without_effect={
    **no_effect(
      "affects only initial weights", "time_step_floor time_step_max"
    ),
    **no_effect("selects an implementation of the same function", "chunk_size"),
    **no_effect(
      "selects an implementation of the same function", "use_mamba_kernels"
    ),
    **no_effect(
      "selects an implementation of the same function", "mamba_ssm_cache_dtype"
    ),
    **no_effect("affects only half precision", "residual_in_fp32"),
    **no_effect("affects only training", "rescale_prenorm_residual"),
    **no_effect(
      "selects which outputs are returned",
      "num_logits_to_keep output_router_logits",
    ),
    **no_effect(
      "is not read by the model class",
      "attention_bias expand mamba_proj_bias moe_shared_expert_overlap "
      "n_shared_experts rms_norm_eps sliding_window tie_word_embeddings "
      "time_step_limit time_step_rank",
    ),
    **no_effect(
      "belongs to positions, which the model lacks", "max_position_embeddings"
    ),
    **no_effect("follows from layers_block_type", "num_hidden_layers"),
    **no_effect(
      "belongs to multi-token prediction layers, which transformers omits",
      "num_nextn_predict_layers mtp_layers_block_type "
      "mtp_hybrid_override_pattern",
    ),
    # Models with such layers read them.
    **no_effect(
      "belongs to experts",
      "n_routed_experts num_experts_per_tok moe_intermediate_size moe_latent_size "
      "moe_shared_expert_intermediate_size n_group topk_group norm_topk_prob "
      "routed_scaling_factor",
    ),
  },
)
"""Decoders with layers of Mamba-2, of attention and of feed-forward networks."""
