"""gpt-oss: OpenAI, arXiv:2508.10925."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.published import experts, family, llama, rotary
from models.published.family import Description, Layout, Row
from models.published.keys import no_effect

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default=150000.0)}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; every second layer has a window."""
  if hf_config.get("quantization_config"):
    raise ValueError(
      "quantization_config: MXFP4 tensors are not read here; load the folder in "
      "transformers with Mxfp4Config(dequantize=True), and save it"
    )
  if not (hf_config.get("rope_parameters") or hf_config.get("rope_scaling")):
    raise ValueError("rope_parameters: missing")
  per_token = family.size(hf_config, "num_experts_per_tok", 4)
  family.only(hf_config, "num_experts_per_tok", experts_per_token=per_token)
  family.only(hf_config, hidden_act="silu")
  kinds = llama.layer_types(hf_config, llama.NEAR, llama.is_last_of(2))
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=family.optional_size(hf_config, "head_dim", 64),
    num_kv_heads=family.optional_size(hf_config, "num_key_value_heads", 8),
    attention_bias=family.flag(hf_config, "attention_bias", True),
    mlp_bias=True,
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-5),
    num_experts=experts.count(hf_config, 128, least=1),
    experts_per_token=per_token,
    router_bias=True,
    gate_slope=family.positive(hf_config, "swiglu_alpha", 1.702),
    gate_limit=family.positive(hf_config, "swiglu_limit", 7.0),
    gate_offset=1.0,
    decoder_attention=llama.windows(hf_config, kinds, {"sinks": True}, 128),
    **rotary.choices(hf_config, _ROTARY),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`; one tensor has the kernels of all experts."""
  theirs, ours = "model.layers.{i}", "params/decoder_{i}"
  mlp, mine = f"{theirs}.mlp.experts", f"{ours}/mlp"
  table = llama.rows()
  table += family.linear(f"{theirs}.mlp.router", "decoder_{i}/mlp/router")
  sinks = f"{ours}/self_attention/attention/sinks"
  return [
    *table,
    Row(f"{theirs}.self_attn.sinks", (sinks,)),
    *(
      Row(
        f"{mlp}.gate_up_proj{suffix}",
        (f"{mine}/gate_{name}", f"{mine}/hidden_{name}"),
        _ALTERNATING,
      )
      for suffix, name in (("", "kernel"), ("_bias", "bias"))
    ),
    Row(f"{mlp}.down_proj", (f"{mine}/out_kernel",)),
    Row(f"{mlp}.down_proj_bias", (f"{mine}/out_bias",)),
  ]


_ALTERNATING = Layout(
  lambda x, n: [x[..., start::n] for start in range(n)],
  lambda xs: np.stack(xs, axis=-1).reshape(*xs[0].shape[:-1], -1),
)
"""Several of our variables, whose columns alternate."""

GPT_OSS = llama.LLAMA._replace(
  name="gpt_oss",
  architectures={"GptOssForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  rotary=_ROTARY,
  without_effect={
    **no_effect("selects outputs other than logits", "output_router_logits"),
    **no_effect("follows from other keys", "initial_context_length"),
  },
)
"""Llama with sinks, windows in every second layer, and experts with limited gates."""
