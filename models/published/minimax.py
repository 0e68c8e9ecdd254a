"""MiniMax-01: MiniMax, arXiv:2501.08313."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import experts, family, llama, mistral, qwen3_next, rotary
from models.published.family import Description, Row

_RECURRENT = "linear_attention"


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; every second layer is lightning attention."""
  kinds = llama.layer_types(hf_config, _RECURRENT, lambda i: i % 2 == 0)
  exact, heads = (
    mistral.mechanism(hf_config, None),
    family.size(hf_config, "num_attention_heads"),
  )
  recurrent = AroundConfig(
    num_kv_heads=heads,
    attention_scale=1.0,
    projection_activation=family.activation(hf_config, "hidden_act", "silu"),
    output_norm="rms_joint_first",
    output_gate="sigmoid",
    position="none",
    residual_factors=_factors(hf_config, "linear_attn"),
  )
  overrides = {llama.EXACT: AroundConfig(), _RECURRENT: recurrent}
  return mistral.describe(
    hf_config,
    names,
    head,
    norm="residual",
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    output_norm_epsilon=1e-6,
    residual_factors=_factors(hf_config, "full_attn"),
    mlp_residual_factors=_factors(hf_config, "mlp"),
    num_experts=experts.count(hf_config, 8, least=1),
    experts_per_token=family.size(hf_config, "num_experts_per_tok", 2),
    decoder_attention=tuple(
      exact if kind == llama.EXACT else _lightning(i, len(kinds))
      for i, kind in enumerate(kinds)
    ),
    decoder_around=tuple(overrides[kind] for kind in kinds),
    **rotary.choices(hf_config, experts.MIXTRAL_ROTARY),
  )


def _factors(hf_config: Mapping[str, Any], name: str) -> tuple[float, float]:
  """Returns the factors of the residual stream and of a sub-layer."""
  alpha = family.number(hf_config, f"{name}_alpha_factor", 1.0)
  return alpha, family.number(hf_config, f"{name}_beta_factor", 1.0)


def _lightning(layer: int, count: int) -> AttentionConfig:
  """Returns the mechanism of layer number `layer` of `count`."""
  options = {"depth": layer / (count - 1 + 1e-5), "slopes": "geometric"}
  return AttentionConfig("lightning", options)


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: those of Mixtral and of lightning attention."""
  every = experts.MIXTRAL.rows(config)
  exact = [row for row in every if "self_attn" in row.theirs]
  table = [row for row in every if "self_attn" not in row.theirs]
  for i, layer in enumerate(config.decoder_configs):
    if layer.slot.output_gate == "none":
      table += [row.for_layer(i) for row in exact]
      continue
    theirs, module = (
      f"model.layers.{i}.self_attn",
      f"decoder_{i}/self_attention",
    )
    names = ("query", "key", "value")
    layout = qwen3_next.grouped_layout(layer.num_heads, (layer.query_dim,) * 3)
    kernels = tuple(f"params/{module}/{name}/kernel" for name in names)
    table += [
      Row(f"{theirs}.qkv_proj.weight", kernels, layout),
      *family.linear(f"{theirs}.output_gate", f"{module}/gate"),
      *family.linear(f"{theirs}.out_proj", f"{module}/out"),
      *family.norm(f"{theirs}.norm", f"{module}/out_norm"),
    ]
  return table


def kept(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Implements `Family.kept`: the decays, which follow from the config."""
  kinds = llama.layer_types(hf_config, _RECURRENT, lambda i: i % 2 == 0)
  heads = family.size(hf_config, "num_attention_heads")
  block = family.size(hf_config, "block_size", 256)
  shapes = {
    "slope_rate": (heads, 1, 1),
    "query_decay": (heads, block, 1),
    "key_decay": (heads, block, 1),
    "diagonal_decay": (1, heads, block, block),
  }
  return {
    f"model.layers.{i}.self_attn.{name}": shape
    for i, kind in enumerate(kinds)
    if kind == _RECURRENT
    for name, shape in shapes.items()
  }


MINIMAX = experts.MIXTRAL._replace(
  name="minimax",
  architectures={"MiniMaxForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  kept=kept,
)
"""Mixtral with lightning attention in most layers, and another residual stream."""
