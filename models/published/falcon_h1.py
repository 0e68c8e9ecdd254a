"""Falcon-H1: Falcon-LLM Team, arXiv:2507.22448."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig, SecondAttention
from models.config import ModelConfig
from models.published import family, llama, mamba2
from models.published.family import Described, Row
from models.published.keys import because
from models.short_convolution import WIDTH


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; Mamba-2 is the second attention of every layer."""
  # Its convolutions have this activation, too.
  family.only(
    theirs,
    hidden_act="silu",
    mamba_d_conv=WIDTH,
    mamba_use_mlp=True,
  )
  gate, out = _factors(theirs, "mlp_multipliers", 2)
  return llama.describe(
    theirs,
    names,
    head,
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 8),
    norm_epsilon=family.number(theirs, "rms_norm_eps", 1e-5),
    embedding_scale=_factor(theirs, "embedding"),
    logit_scale=_factor(theirs, "lm_head"),
    input_factor=_factor(theirs, "attention_in"),
    projection_factors=(1.0, _factor(theirs, "key"), 1.0, 1.0),
    residual_factors=(1.0, _factor(theirs, "attention_out")),
    gate_factor=gate,
    mlp_residual_factors=(1.0, out),
    second_attention=_mixer(theirs),
  )


def _mixer(theirs: Mapping[str, Any]) -> SecondAttention:
  """Mamba-2 with factors of all that it projects."""
  heads = family.size(theirs, "mamba_n_heads", 128)
  groups = family.size(theirs, "mamba_n_groups", 1)
  inner = family.optional_size(theirs, "mamba_d_ssm", 1024)
  if inner is None:
    expand = family.size(theirs, "mamba_expand", 2)
    inner = expand * family.size(theirs, "hidden_size")
  if inner % heads:
    raise ValueError(
      f"mamba_n_heads: expected a divisor of mamba_d_ssm {inner}, got {heads}"
    )
  if theirs.get("mamba_d_head") != "auto":
    family.only(theirs, mamba_d_head=inner // heads)
  is_first = family.flag(theirs, "mamba_norm_before_gate", True)
  has_norm = family.flag(theirs, "mamba_rms_norm", False)
  gate, value, key, query, step = _factors(theirs, "ssm_multipliers", 5)
  has_bias = family.flag(theirs, "mamba_proj_bias", False)
  options = {
    "projection_bias": has_bias,
    "step_factor": step,
    **mamba2.step_limits(theirs),
  }
  around = mamba2.mixer(
    heads,
    groups,
    head_dim=family.size(theirs, "mamba_d_state", 256),
    value_dim=inner // heads,
    attention_bias=has_bias,
    out_bias=family.flag(theirs, "projectors_bias", False),
    input_factor=_factor(theirs, "ssm_in"),
    projection_factors=(query, key, value, gate),
    short_convolution_bias=family.flag(theirs, "mamba_conv_bias", True),
    position="none",
    residual_factors=(1.0, _factor(theirs, "ssm_out")),
  )
  if not has_norm:
    around["output_norm"] = "none"
  elif is_first:
    around["output_norm"] += "_first"
  return SecondAttention(
    mechanism=AttentionConfig("mamba2", options), around=AroundConfig(**around)
  )


def _factor(theirs: Mapping[str, Any], name: str) -> float:
  return family.number(theirs, f"{name}_multiplier", 1.0)


def _factors(theirs: Mapping[str, Any], name: str, count: int) -> list[float]:
  """Several factors, of which a file may have none."""
  if theirs.get(name) is None:
    return [1.0] * count
  given = family.value(theirs, name, list[float])
  if len(given) != count:
    raise ValueError(f"{name}: expected {count} numbers, got {given}")
  return given


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: Llama's by other names, and those of Mamba-2."""
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
    **because("is of what is returned", "num_logits_to_keep"),
    **because("is of how the same numbers are computed", "mamba_chunk_size"),
    **because("is said by mamba_d_ssm", "mamba_expand"),
    **because("is said by intermediate_size", "mlp_expansion_factor"),
    **because("is always so", "layer_types layers_block_type"),
    **because(
      "is of what weights begin with",
      "time_step_floor time_step_max time_step_min time_step_rank",
    ),
  },
)
"""Attention and Mamba-2 beside each other in every layer, with many factors."""
