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
from models.published.family import Described, Family, Row
from models.published.keys import because
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
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; the config is that of a layer of each kind at once."""
  del names
  family.only(theirs, conv_kernel=WIDTH, mamba_hidden_act="silu")
  kinds = _layers(theirs)
  heads = family.size(theirs, "num_attention_heads", 32)
  width = family.size(theirs, "head_dim", 128)
  family.only(theirs, attention_head_dim=width)
  sparse = _experts(theirs) if _SPARSE in kinds else {}
  around = {
    _EXACT: AroundConfig(mlp_features=0),
    _RECURRENT: _mixer(theirs),
    _SPARSE: AroundConfig(self_attention=False),
    _DENSE: AroundConfig(self_attention=False, num_experts=0),
  }
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=len(kinds),
    num_heads=heads,
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 8)
    or heads,
    head_dim=width,
    features=family.size(theirs, "hidden_size", 4096),
    mlp_features=family.size(theirs, "intermediate_size", 21504),
    mlp_bias=family.flag(theirs, "mlp_bias", False),
    activation=family.activation(theirs, "mlp_hidden_act", "relu2"),
    position="none",
    norm="pre",
    norm_kind="rms",
    norm_epsilon=family.number(theirs, "layer_norm_epsilon", 1e-5),
    embedding_scale=1.0,
    tie_embeddings=False,
    head=head,
    decoder_attention=tuple(_mechanism(theirs, kind) for kind in kinds),
    decoder_around=tuple(around[kind] for kind in kinds),
    **sparse,
  )
  vocab_size = family.size(theirs, "vocab_size", 131072)
  return Described(config, vocab_size, vocab_size, mamba2.LONGEST)


def _layers(theirs: Mapping[str, Any]) -> Sequence[str]:
  """The kind of every layer, from a list or, in the first files, from a text."""
  name, pattern = "layers_block_type", "hybrid_override_pattern"
  if theirs.get(name) is None and pattern in theirs:
    name = pattern
    given = [*family.value(theirs, pattern, str)]
    kinds = [_SYMBOLS.get(kind, kind) for kind in given]
  else:
    default = [_RECURRENT, _SPARSE, _EXACT, _DENSE]
    given = family.value(theirs, name, list[str], default)
    kinds = [_OLD.get(kind, kind) for kind in given]
  if not kinds or not {*kinds} <= {*_KINDS}:
    known = ", ".join(_SYMBOLS if name == pattern else _KINDS)
    got = reprlib.repr(given)
    raise ValueError(f"{name}: expected some of {known}, got {got}")
  return kinds


def _mechanism(theirs: Mapping[str, Any], kind: str) -> AttentionConfig:
  """The mechanism of a layer; one without attention has none to use."""
  # In transformers, a step is at least what others begin with.
  least = family.number(theirs, "time_step_min", 0.001)
  if kind != _RECURRENT:
    return AttentionConfig("dense")
  has_bias = family.flag(theirs, "use_bias", False)
  options = {"projection_bias": has_bias, "min_step": least}
  return AttentionConfig("mamba2", options)


def _mixer(theirs: Mapping[str, Any]) -> AroundConfig:
  """The overrides of a layer of Mamba-2."""
  fields = mamba2.mixer(
    family.size(theirs, "mamba_num_heads", 128),
    family.size(theirs, "n_groups", 8),
    mlp_features=0,
    head_dim=family.size(theirs, "ssm_state_size", 128),
    value_dim=family.size(theirs, "mamba_head_dim", 64),
    attention_bias=family.flag(theirs, "use_bias", False),
    short_convolution_bias=family.flag(theirs, "use_conv_bias", True),
  )
  return AroundConfig(**fields)


def _experts(theirs: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of layers with experts, which have no biases here."""
  family.only(theirs, mlp_bias=False)
  return {
    "num_experts": family.size(theirs, "n_routed_experts", 8),
    "experts_per_token": family.size(theirs, "num_experts_per_tok", 2),
    "expert_features": family.size(theirs, "moe_intermediate_size", 7688),
    "expert_latent_features": family.optional_size(theirs, "moe_latent_size"),
    "shared_features": family.size(
      theirs, "moe_shared_expert_intermediate_size", 7688
    ),
    "router_scores": "sigmoid",
    "selection_bias": True,
    "expert_groups": family.size(theirs, "n_group", 1),
    "groups_per_token": family.size(theirs, "topk_group", 1),
    "normalize_weights": family.flag(theirs, "norm_topk_prob", True),
    "routed_scale": family.number(theirs, "routed_scaling_factor", 1.0),
  }


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`; a layer has variables for the rows of its kind alone."""
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
    **because("is of what weights begin with", "time_step_floor time_step_max"),
    **because("is of how the same numbers are computed", "chunk_size"),
    **because("is of how the same numbers are computed", "use_mamba_kernels"),
    **because(
      "is of how the same numbers are computed", "mamba_ssm_cache_dtype"
    ),
    **because("is of half precision", "residual_in_fp32"),
    **because("is of training", "rescale_prenorm_residual"),
    **because(
      "is of what is returned", "num_logits_to_keep output_router_logits"
    ),
    **because(
      "is not read by its class",
      "attention_bias expand mamba_proj_bias moe_shared_expert_overlap "
      "n_shared_experts rms_norm_eps sliding_window tie_word_embeddings "
      "time_step_limit time_step_rank",
    ),
    **because("has no positions", "max_position_embeddings"),
    **because("is said by layers_block_type", "num_hidden_layers"),
    **because(
      "is of layers that predict several tokens at once, which transformers leaves "
      "out",
      "num_nextn_predict_layers mtp_layers_block_type "
      "mtp_hybrid_override_pattern",
    ),
    # They are read in models that have such layers.
    **because(
      "is of experts",
      "n_routed_experts num_experts_per_tok moe_intermediate_size moe_latent_size "
      "moe_shared_expert_intermediate_size n_group topk_group norm_topk_prob "
      "routed_scaling_factor",
    ),
  },
)
"""Layers of Mamba-2, of attention without positions, and of feed-forward networks."""
