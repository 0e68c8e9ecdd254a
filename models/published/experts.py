"""Mixtral, arXiv:2401.04088, and Qwen3-MoE, arXiv:2505.09388: mixtures of experts."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from annotated_types import Ge

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, mistral, rotary
from models.published.family import TRANSPOSED, Description, Row
from models.published.keys import no_effect

KERNELS = MappingProxyType(
  {"gate_proj": "gate", "up_proj": "hidden", "down_proj": "out"}
)
"""Projections of an expert in most files -> our kernels."""

MIXTRAL_KERNELS = MappingProxyType({"w1": "gate", "w3": "hidden", "w2": "out"})
"""Projections of an expert in files of Mixtral -> our kernels."""


def rows(
  config: ModelConfig,
  theirs: str = "model.layers.{i}.mlp",
  kernels: Mapping[str, str] = KERNELS,
) -> list[Row]:
  """Returns the rows of a router and of its experts, with one tensor per expert.

  Args:
    config: config of the model, with the number of experts.
    theirs: name of the module in transformers.
    kernels: names of the projections -> our kernels.
  """
  ours = "decoder_{i}/mlp"
  return [
    *family.linear(f"{theirs}.gate", f"{ours}/router"),
    *(
      Row(
        f"{theirs}.experts.{expert}.{name}.weight",
        (f"params/{ours}/{kernel}_kernel",),
        TRANSPOSED,
        expert,
      )
      for name, kernel in kernels.items()
      for expert in range(config.mlp.num_experts)
    ),
  ]


def shared_rows(
  theirs: str = "model.layers.{i}.mlp.shared_expert",
  kernels: Mapping[str, str] = KERNELS,
) -> list[Row]:
  """Returns the rows of the shared expert and of its gate."""
  table = family.linear(f"{theirs}_gate", "decoder_{i}/mlp/shared_gate")
  for name, ours in kernels.items():
    table += family.linear(
      f"{theirs}.{name}", f"decoder_{{i}}/mlp/shared/{ours}"
    )
  return table


def selection_rows(
  config: ModelConfig, theirs: str = "model.layers.{i}.mlp"
) -> list[Row]:
  """Returns the rows of the router's selection bias, which affects only the choice.

  There is one row per layer, because a row for all layers (`{i}`) would end at the
  first layer without experts.
  """
  theirs = f"{theirs}.gate.e_score_correction_bias"
  ours = "constants/decoder_{i}/mlp/selection_bias"
  layers = range(len(config.decoder_configs))
  return [Row(theirs.format(i=i), (ours.format(i=i),)) for i in layers]


def count(hf_config: Mapping[str, Any], default: int, least: int = 0) -> int:
  """Returns the number of experts, which has two equivalent keys.

  Raises:
    ValueError: both keys exist and differ.
  """
  kind = Annotated[int, Ge(least)]
  names = [x for x in ("num_local_experts", "num_experts") if x in hf_config]
  numbers = {family.value(hf_config, name, kind, default) for name in names}
  if len(numbers) > 1:
    raise ValueError(
      f"num_experts: expected the value of num_local_experts, "
      f"{hf_config['num_local_experts']}, got {hf_config['num_experts']}"
    )
  return [*numbers, default][0]


def qwen_experts(
  hf_config: Mapping[str, Any],
  number: int,
  per_token: int = 8,
  width: int = 768,
  normalize: bool | None = False,
) -> tuple[dict[str, Any], tuple[int | None, ...]]:
  """Returns the fields of Qwen's experts, and an override per layer.

  The override is 0 for a layer without experts and None for any other.

  Args:
    hf_config: `config.json`.
    number: number of experts; 0 means a model without experts.
    per_token: default number of experts per token.
    width: default inner width of an expert.
    normalize: default of whether weights are normalised; None means always.

  Raises:
    ValueError: a layer is named twice.
  """
  every = family.size(hf_config, "decoder_sparse_step", 1)
  dense = family.optional(hf_config, "mlp_only_layers", list[int], ())
  if len({*dense}) < len(dense):
    raise ValueError(f"mlp_only_layers: expected each layer once, got {dense}")
  fields: dict[str, Any] = {
    "num_experts": number,
    "experts_per_token": family.size(
      hf_config, "num_experts_per_tok", per_token
    ),
    "expert_features": family.size(hf_config, "moe_intermediate_size", width),
  }
  if normalize is not None:
    is_normalized = family.flag(hf_config, "norm_topk_prob", normalize)
    fields["normalize_weights"] = is_normalized
  layers = range(family.size(hf_config, "num_hidden_layers"))
  if not number:
    return {}, (None,) * len(layers)
  has_experts = [i not in dense and (i + 1) % every == 0 for i in layers]
  return fields, tuple(None if x else 0 for x in has_experts)


def describe_mixtral(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; every layer has experts."""
  return mistral.describe(
    hf_config,
    names,
    head,
    window=None,
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    num_experts=count(hf_config, 8, least=1),
    experts_per_token=family.size(hf_config, "num_experts_per_tok", 2),
    **rotary.choices(hf_config, MIXTRAL_ROTARY),
  )


def describe_qwen3(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; all layers have a window, or none."""
  mechanism = AttentionConfig("dense")
  if family.flag(hf_config, "use_sliding_window", False):
    mechanism = mistral.mechanism(hf_config, 4096)
  fields, layers = qwen_experts(hf_config, count(hf_config, 128))
  if 0 in layers:
    overrides = tuple(AroundConfig(num_experts=number) for number in layers)
    fields["decoder_around"] = overrides
  return llama.describe(
    hf_config,
    names,
    head,
    mlp_bias=False,
    decoder_attention=mechanism,
    attention_bias=family.flag(hf_config, "attention_bias", False),
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 4),
    query_key_norm="rms",
    **rotary.choices(hf_config),
    **fields,
  )


MIXTRAL_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default=1e6)}
"""Rotary positions of Mixtral."""

_WITHOUT_EFFECT = no_effect(
  "selects outputs other than logits", "output_router_logits"
)

MIXTRAL = llama.LLAMA._replace(
  name="mixtral",
  architectures={"MixtralForCausalLM": "tokens"},
  describe=describe_mixtral,
  rows=lambda config: (
    llama.rows()
    + rows(config, "model.layers.{i}.block_sparse_moe", MIXTRAL_KERNELS)
  ),
  rotary=MIXTRAL_ROTARY,
  without_effect={
    **_WITHOUT_EFFECT,
    **no_effect("affects only training", "router_jitter_noise"),
  },
)
"""Mistral with experts in every layer."""

QWEN3_MOE = llama.LLAMA._replace(
  name="qwen3_moe",
  architectures={"Qwen3MoeForCausalLM": "tokens"},
  describe=describe_qwen3,
  rows=lambda config: llama.rows() + rows(config),
  without_effect={
    **_WITHOUT_EFFECT,
    **no_effect("is used only with use_sliding_window", "sliding_window"),
    **no_effect("is not read by the model class", "max_window_layers"),
  },
)
"""Qwen3 with experts; all layers have the same window, or none."""
