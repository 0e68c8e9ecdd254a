"""MiniMax-01: MiniMax, arXiv:2501.08313."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import experts, family, llama, mistral, qwen3_next, rotary
from models.published.family import Described, Row

_RECURRENT = "linear_attention"


def describe(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; every second layer is lightning attention."""
  kinds = llama.layer_types(theirs, _RECURRENT, lambda i: i % 2 == 0)
  exact, heads = (
    mistral.mechanism(theirs, None),
    family.size(theirs, "num_attention_heads"),
  )
  recurrent = AroundConfig(
    num_kv_heads=heads,
    attention_scale=1.0,
    projection_activation=family.activation(theirs, "hidden_act", "silu"),
    output_norm="rms_joint_first",
    output_gate="sigmoid",
    position="none",
    residual_factors=_factors(theirs, "linear_attn"),
  )
  overrides = {llama.EXACT: AroundConfig(), _RECURRENT: recurrent}
  return mistral.describe(
    theirs,
    names,
    head,
    norm="residual",
    norm_epsilon=family.number(theirs, "rms_norm_eps", 1e-5),
    output_norm_epsilon=1e-6,
    residual_factors=_factors(theirs, "full_attn"),
    mlp_residual_factors=_factors(theirs, "mlp"),
    num_experts=experts.count(theirs, 8, least=1),
    experts_per_token=family.size(theirs, "num_experts_per_tok", 2),
    decoder_attention=tuple(
      exact if kind == llama.EXACT else _lightning(i, len(kinds))
      for i, kind in enumerate(kinds)
    ),
    decoder_around=tuple(overrides[kind] for kind in kinds),
    **rotary.choices(theirs, experts.MIXTRAL_ROTARY),
  )


def _factors(theirs: Mapping[str, Any], name: str) -> tuple[float, float]:
  """Factors of the residual stream and of a sub-layer."""
  alpha = family.number(theirs, f"{name}_alpha_factor", 1.0)
  return alpha, family.number(theirs, f"{name}_beta_factor", 1.0)


def _lightning(layer: int, count: int) -> AttentionConfig:
  """The mechanism of a layer out of `count`."""
  options = {"depth": layer / (count - 1 + 1e-5), "slopes": "geometric"}
  return AttentionConfig("lightning", options)


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`: Mixtral's, and those of lightning attention."""
  every = experts.MIXTRAL.rows(config)
  exact = [row for row in every if "self_attn" in row.theirs]
  table = [row for row in every if "self_attn" not in row.theirs]
  for i, layer in enumerate(config.decoder_configs):
    if layer.slot.output_gate == "none":
      table += [row.of_layer(i) for row in exact]
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


def kept(theirs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Implements `Family.kept`: the decays, which follow from the config."""
  kinds = llama.layer_types(theirs, _RECURRENT, lambda i: i % 2 == 0)
  heads = family.size(theirs, "num_attention_heads")
  block = family.size(theirs, "block_size", 256)
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
