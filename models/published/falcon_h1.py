"""Falcon-H1: Falcon-LLM Team, arXiv:2507.22448."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig, SecondAttention
from models.config import ModelConfig
from models.published import family, llama, mamba2
from models.published.family import Description, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; Mamba-2 is the second attention of every layer."""
  # Convolutions use this activation as well.
  family.only(
    hf_config,
    hidden_act="silu",
    mamba_d_conv=WIDTH,
    mamba_use_mlp=True,
  )
  gate, out = _factors(hf_config, "mlp_multipliers", 2)
  return llama.describe(
    hf_config,
    names,
    head,
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 8),
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    embedding_scale=_factor(hf_config, "embedding"),
    logit_scale=_factor(hf_config, "lm_head"),
    input_factor=_factor(hf_config, "attention_in"),
    projection_factors=(1.0, _factor(hf_config, "key"), 1.0, 1.0),
    residual_factors=(1.0, _factor(hf_config, "attention_out")),
    gate_factor=gate,
    mlp_residual_factors=(1.0, out),
    second_attention=_mixer(hf_config),
  )


def _mixer(hf_config: Mapping[str, Any]) -> SecondAttention:
  """Returns the fields of Mamba-2, with a factor for each projection."""
  heads = family.size(hf_config, "mamba_n_heads", 128)
  groups = family.size(hf_config, "mamba_n_groups", 1)
  inner = family.optional_size(hf_config, "mamba_d_ssm", 1024)
  if inner is None:
    expand = family.size(hf_config, "mamba_expand", 2)
    inner = expand * family.size(hf_config, "hidden_size")
  family.check_divisor("mamba_n_heads", heads, "mamba_d_ssm", inner)
  family.check_divisor("mamba_n_groups", groups, "mamba_n_heads", heads)
  if hf_config.get("mamba_d_head") != "auto":
    source = "mamba_d_ssm / mamba_n_heads"
    family.only(hf_config, source, mamba_d_head=inner // heads)
  is_first = family.flag(hf_config, "mamba_norm_before_gate", True)
  has_norm = family.flag(hf_config, "mamba_rms_norm", False)
  gate, value, key, query, step = _factors(hf_config, "ssm_multipliers", 5)
  has_bias = family.flag(hf_config, "mamba_proj_bias", False)
  options = {
    "projection_bias": has_bias,
    "step_factor": step,
    **mamba2.step_limits(hf_config),
  }
  fields = mamba2.mixer(
    heads,
    groups,
    head_dim=family.size(hf_config, "mamba_d_state", 256),
    value_dim=inner // heads,
    attention_bias=has_bias,
    out_bias=family.flag(hf_config, "projectors_bias", False),
    input_factor=_factor(hf_config, "ssm_in"),
    projection_factors=(query, key, value, gate),
    short_convolution_bias=family.flag(hf_config, "mamba_conv_bias", True),
    position="none",
    residual_factors=(1.0, _factor(hf_config, "ssm_out")),
  )
  if not has_norm:
    fields["output_norm"] = "none"
  elif is_first:
    fields["output_norm"] += "_first"
  return SecondAttention(
    mechanism=AttentionConfig("mamba2", options), around=AroundConfig(**fields)
  )


def _factor(hf_config: Mapping[str, Any], name: str) -> float:
  return family.number(hf_config, f"{name}_multiplier", 1.0)


def _factors(
  hf_config: Mapping[str, Any], name: str, count: int
) -> list[float]:
  """Returns several factors, which are 1 if the file has none."""
  if hf_config.get(name) is None:
    return [1.0] * count
  given = family.value(hf_config, name, list[float])
  if len(given) != count:
    raise ValueError(f"{name}: expected {count} numbers, got {given}")
  return given


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Llama, renamed, and those of Mamba-2."""
  norms = {
    "input_layernorm": "self_attention_norm",
    "pre_ff_layernorm": "mlp_norm",
  }
  names = {"}.mlp.": "}.feed_forward.", "model.norm.": "model.final_layernorm."}
  table = llama.rows(norms)
  for old, new in names.items():
    table = [row._replace(theirs=row.theirs.replace(old, new)) for row in table]
  for i, layer in enumerate(config.decoder_configs):
    if layer.second is not None:
      module = f"decoder_{i}/second_attention"
      theirs = f"model.layers.{i}.mamba"
      table += mamba2.mixer_rows(theirs, module, layer.second, is_own=True)
  return table


FALCON_H1 = llama.LLAMA._replace(
  name="falcon_h1",
  architectures={"FalconH1ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  parts=("embed_tokens", "layers", "final_layernorm"),
  without_effect={
    **no_effect("selects which outputs are returned", "num_logits_to_keep"),
    **no_effect(
      "selects an implementation of the same function", "mamba_chunk_size"
    ),
    **no_effect("follows from mamba_d_ssm", "mamba_expand"),
    **no_effect("follows from intermediate_size", "mlp_expansion_factor"),
    **no_effect(
      "has the same value in the whole family", "layer_types layers_block_type"
    ),
    **no_effect(
      "affects only initial weights",
      "time_step_floor time_step_max time_step_min time_step_rank",
    ),
  },
)
"""Decoders with attention and Mamba-2 in parallel in every layer."""
