"""OLMo 2, 3 and hybrid: OLMo Team, arXiv:2501.00656, 2512.13961 and 2604.03444."""

from collections.abc import Collection, Mapping
from typing import Any

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import family, llama, mamba2, qwen3_next, rotary
from models.published.family import Description, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  **others: Any,
) -> Description:
  """Implements `Family.describe`; `others` are config fields in which a family differs."""
  return llama.describe(
    hf_config,
    names,
    head,
    mlp_bias=False,
    norm="output",
    query_key_norm="rms_joint",
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    **others,
  )


def describe_with_windows(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for OLMo 3: three of four layers have a window."""
  kinds = llama.layer_types(hf_config, llama.NEAR, llama.is_last_of(4))
  return describe(
    hf_config,
    names,
    head,
    decoder_attention=llama.windows(hf_config, kinds),
    decoder_around=rotary.overrides(hf_config, _TYPES, kinds),
  )


# transformers 4 and 5 have different defaults, so θ has to be in the file.
_TYPES: rotary.LayerTypes = {
  llama.EXACT: rotary.Rotary(default=None),
  llama.NEAR: rotary.Rotary(default=None, scaled=False),
}


_NORMS = {
  "post_attention_layernorm": "self_attention_norm",
  "post_feedforward_layernorm": "mlp_norm",
}

OLMO2 = llama.LLAMA._replace(
  name="olmo2",
  architectures={"Olmo2ForCausalLM": "tokens"},
  describe=describe,
  rows=lambda config: llama.rows(_NORMS),
  rotary={None: rotary.Rotary(type_key="type")},
)
"""Norms of sub-layer outputs, and of queries and keys over all heads together."""

OLMO3 = OLMO2._replace(
  name="olmo3",
  architectures={"Olmo3ForCausalLM": "tokens"},
  describe=describe_with_windows,
  rotary=_TYPES,
)
"""OLMo 2 with a window in three of four layers."""


_RECURRENT = "linear_attention"
_NO_POSITIONS = {"rope_type": "default", "rope_theta": None}


def describe_hybrid(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for OLMo hybrid.

  Three of four layers are Gated DeltaNet with norm 'pre'.
  """
  family.only(hf_config, hidden_act="silu", linear_conv_kernel_dim=WIDTH)
  kinds = llama.layer_types(hf_config, _RECURRENT, llama.is_last_of(4))
  if llama.EXACT not in kinds and hf_config.get("layer_types") is None:
    kinds = [*kinds[:-1], llama.EXACT]
  is_rotary = hf_config.get("rope_parameters") != _NO_POSITIONS
  positions = rotary.choices(hf_config) if is_rotary else {"position": "none"}
  is_negative = family.flag(hf_config, "linear_allow_neg_eigval", True)
  options = {"max_rate": 2.0 if is_negative else 1.0}
  mechanisms = {
    llama.EXACT: AttentionConfig("dense"),
    _RECURRENT: AttentionConfig("gated_delta", options),
  }
  overrides = {llama.EXACT: AroundConfig(), _RECURRENT: _recurrent(hf_config)}
  return llama.describe(
    hf_config,
    names,
    head,
    mlp_bias=False,
    norm="output",
    query_key_norm="rms_joint",
    output_norm_epsilon=1e-5,
    decoder_attention=tuple(mechanisms[kind] for kind in kinds),
    decoder_around=tuple(overrides[kind] for kind in kinds),
    **positions,
  )


def _recurrent(hf_config: Mapping[str, Any]) -> AroundConfig:
  """Returns the overrides of a recurrent layer."""
  heads = family.size(hf_config, "num_attention_heads")
  keys = family.optional_size(hf_config, "linear_num_key_heads") or heads
  values = family.optional_size(hf_config, "linear_num_value_heads") or heads
  source = "linear_num_value_heads"
  family.check_divisor("linear_num_key_heads", keys, source, values)
  key_dim = family.optional_size(hf_config, "linear_key_head_dim")
  key_dim = key_dim or int(0.75 * family.size(hf_config, "hidden_size") / keys)
  value_dim = family.optional_size(hf_config, "linear_value_head_dim")
  return qwen3_next.delta_layer(
    num_heads=values,
    num_qk_heads=keys,
    head_dim=key_dim,
    value_dim=value_dim or 2 * key_dim,
    norm="pre",
  )


def hybrid_rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows` for OLMo hybrid."""
  every = llama.rows({})
  exact = [row for row in every if "self_attn" in row.theirs]
  table = [row for row in every if row not in exact]
  mechanisms = config.layers("decoder_attention")
  for i, layer in enumerate(config.decoder_configs):
    theirs, ours = f"model.layers.{i}", f"decoder_{i}"
    if not layer.slot.short_convolution:
      norms = {
        "feedforward_layer_norm": "self_attention_norm",
        "post_feedforward_layernorm": "mlp_norm",
      }
      table += [row.for_layer(i) for row in exact]
    else:
      norms = {
        "attention_layer_norm": "self_attention_norm",
        "feedforward_layer_norm": "mlp_norm",
      }
      is_own = mechanisms[i].name == "gated_delta"
      module = f"{ours}/self_attention"
      table += _recurrent_rows(f"{theirs}.linear_attn", module, layer, is_own)
    for old, new in norms.items():
      table += family.norm(f"{theirs}.{old}", f"{ours}/{new}")
  return table


def _recurrent_rows(
  theirs: str, module: str, layer: ModelConfig, is_own: bool
) -> list[Row]:
  """Returns the rows of a Gated DeltaNet, with its gates if the mechanism is its own."""
  groups = layer.slot.num_qk_heads or layer.num_heads
  keys = groups * layer.query_dim
  values = layer.num_heads * (layer.slot.value_dim or layer.query_dim)
  names = ("query", "key", "value")
  table = [
    Row(
      f"{theirs}.conv1d.weight",
      tuple(f"params/{module}/{x}_short_convolution/kernel" for x in names),
      mamba2.filters((keys, keys, values)),
    ),
    *family.norm(f"{theirs}.o_norm", f"{module}/out_norm"),
  ]
  modules = {"q": "query", "k": "key", "v": "value", "g": "gate", "o": "out"}
  for old, new in modules.items():
    table += family.linear(f"{theirs}.{old}_proj", f"{module}/{new}")
  if not is_own:
    return table
  own, layout = f"params/{module}/attention", family.TRANSPOSED
  return [
    *table,
    Row(f"{theirs}.b_proj.weight", (f"{own}/rate_kernel",), layout),
    Row(f"{theirs}.a_proj.weight", (f"{own}/step_kernel",), layout),
    Row(f"{theirs}.dt_bias", (f"{own}/step_bias",)),
    Row(f"{theirs}.A_log", (f"{own}/log_rate",)),
  ]


OLMO_HYBRID = llama.LLAMA._replace(
  name="olmo_hybrid",
  architectures={"OlmoHybridForCausalLM": "tokens"},
  describe=describe_hybrid,
  rows=hybrid_rows,
  rotary=None,
  renamed=(
    ("input_layernorm.weight", "attention_layer_norm.weight"),
    ("post_attention_layernorm.weight", "feedforward_layer_norm.weight"),
  ),
  joined=(
    (
      "linear_attn.conv1d.weight",
      tuple(f"linear_attn.{x}_conv1d.weight" for x in "qkv"),
    ),
  ),
  without_effect=no_effect(
    "affects only initial weights",
    "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max "
    "linear_dt_init_floor",
  ),
)
"""OLMo 3 with three layers of Gated DeltaNet for each layer of exact attention."""
