"""Mixtral, arXiv:2401.04088, and Qwen3-MoE, arXiv:2505.09388: experts in dense families."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from annotated_types import Ge

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, mistral, rotary
from models.published.family import TRANSPOSED, Described, Row
from models.published.keys import because

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
  """Returns the rows of a router and of its experts, whose tensors are separate.

  Args:
    config: has the number of experts.
    theirs: the name of the module.
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
  """Returns the rows of the network that all tokens pass through, and of its gate."""
  table = family.linear(f"{theirs}_gate", "decoder_{i}/mlp/shared_gate")
  for name, ours in kernels.items():
    table += family.linear(
      f"{theirs}.{name}", f"decoder_{{i}}/mlp/shared/{ours}"
    )
  return table


def selection_rows(
  config: ModelConfig, theirs: str = "model.layers.{i}.mlp"
) -> list[Row]:
  """Returns the rows of the constants that are added to scores for the choice alone.

  One for each layer, as layers without experts have none, at which rows of all layers
  would end.
  """
  theirs = f"{theirs}.gate.e_score_correction_bias"
  ours = "constants/decoder_{i}/mlp/selection_bias"
  layers = range(len(config.decoder_configs))
  return [Row(theirs.format(i=i), (ours.format(i=i),)) for i in layers]


def count(theirs: Mapping[str, Any], default: int, least: int = 0) -> int:
  """Returns the number of experts, which has two names that mean the same.

  Raises:
    ValueError: both are there and differ.
  """
  kind = Annotated[int, Ge(least)]
  names = [x for x in ("num_local_experts", "num_experts") if x in theirs]
  numbers = {family.value(theirs, name, kind, default) for name in names}
  if len(numbers) > 1:
    raise ValueError(
      f"num_experts: expected that of num_local_experts, "
      f"{theirs['num_local_experts']}, got {theirs['num_experts']}"
    )
  return [*numbers, default][0]


def of_qwen(
  theirs: Mapping[str, Any],
  number: int,
  per_token: int = 8,
  width: int = 768,
  normalize: bool | None = False,
) -> tuple[dict[str, Any], tuple[int | None, ...]]:
  """Returns the fields of the experts of a Qwen, and the override of each layer.

  The override is 0 in a layer without experts and None in any other.

  Args:
    theirs: `config.json`.
    number: of experts; 0 is a model without any.
    per_token: experts of a token in files that do not say it.
    width: likewise, inside an expert.
    normalize: likewise, whether weights are normalized; None is always.

  Raises:
    ValueError: a layer is named twice.
  """
  every = family.size(theirs, "decoder_sparse_step", 1)
  dense = family.optional(theirs, "mlp_only_layers", list[int], ())
  if len({*dense}) < len(dense):
    raise ValueError(f"mlp_only_layers: expected each layer once, got {dense}")
  fields: dict[str, Any] = {
    "num_experts": number,
    "experts_per_token": family.size(theirs, "num_experts_per_tok", per_token),
    "expert_features": family.size(theirs, "moe_intermediate_size", width),
  }
  if normalize is not None:
    is_normalized = family.flag(theirs, "norm_topk_prob", normalize)
    fields["normalize_weights"] = is_normalized
  layers = range(family.size(theirs, "num_hidden_layers"))
  if not number:
    return {}, (None,) * len(layers)
  has_experts = [i not in dense and (i + 1) % every == 0 for i in layers]
  return fields, tuple(None if x else 0 for x in has_experts)


def describe_mixtral(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; every layer has experts."""
  return mistral.describe(
    theirs,
    names,
    head,
    window=None,
    norm_epsilon=family.number(theirs, "rms_norm_eps", 1e-5),
    num_experts=count(theirs, 8, least=1),
    experts_per_token=family.size(theirs, "num_experts_per_tok", 2),
    **rotary.choices(theirs, MIXTRAL_ROTARY),
  )


def describe_qwen3(
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe`; all layers have a window, or none."""
  mechanism = AttentionConfig("dense")
  if family.flag(theirs, "use_sliding_window", False):
    family.size(theirs, "sliding_window", 4096)  # A null is refused.
    mechanism = mistral.mechanism(theirs, 4096)
  fields, layers = of_qwen(theirs, count(theirs, 128))
  if 0 in layers:
    overrides = tuple(AroundConfig(num_experts=number) for number in layers)
    fields["decoder_around"] = overrides
  return llama.describe(
    theirs,
    names,
    head,
    mlp_bias=False,
    decoder_attention=mechanism,
    attention_bias=family.flag(theirs, "attention_bias", False),
    num_kv_heads=family.optional_size(theirs, "num_key_value_heads", 4),
    query_key_norm="rms",
    **rotary.choices(theirs),
    **fields,
  )


MIXTRAL_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default=1e6)}
"""Rotary positions of Mixtral."""

_WITHOUT_EFFECT = because(
  "is of what is returned beside logits", "output_router_logits"
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
    **because("is of training", "router_jitter_noise"),
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
    **because("is of windows, which use_sliding_window has", "sliding_window"),
    **because("is not read by its class", "max_window_layers"),
  },
)
"""Qwen3 with experts, whose window is that of all layers."""
