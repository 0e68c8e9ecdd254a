"""RecurrentGemma: Griffin, De et al., arXiv:2402.19427; arXiv:2404.07839."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from models import nested
from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.head_projections import projection_shapes
from models.published import family, mamba, mamba2, rotary
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH

_ROTARY: rotary.LayerTypes = {None: rotary.Rotary(default_share=0.5)}
_KINDS = ("recurrent", "attention")


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; the model's config describes an attention layer."""
  del names
  features = family.size(hf_config, "hidden_size", 2560)
  heads = family.size(hf_config, "num_attention_heads", 10)
  width = family.optional_size(hf_config, "lru_width") or features
  pairs = family.size(hf_config, "intermediate_size", 7680)
  for name, size, count, source in (
    ("hidden_size", features, heads, "num_attention_heads "),
    ("lru_width", width, heads, "num_attention_heads "),
    ("intermediate_size", pairs, 2, ""),
  ):
    if size % count:
      raise ValueError(
        f"{name}: expected a multiple of {source}{count}, got {size}"
      )
  family.only(
    hf_config, conv1d_width=WIDTH, hidden_activation="gelu_pytorch_tanh"
  )
  source = "hidden_size / num_attention_heads"
  family.only(hf_config, source, head_dim=features // heads)
  kinds = family.value(
    hf_config, "block_types", list[str], ["recurrent", "recurrent", "attention"]
  )
  if not kinds or not set(kinds) <= set(_KINDS):
    raise ValueError(
      f"block_types: expected a list of {' and '.join(_KINDS)}, got {kinds}"
    )
  count = family.size(hf_config, "num_hidden_layers", 26)
  kinds = [kinds[i % len(kinds)] for i in range(count)]
  window = family.size(hf_config, "attention_window_size", 2048)
  # transformers takes it for another name of the key.
  family.only(hf_config, "attention_window_size", sliding_window=window)
  override = {
    "attention": AroundConfig(
      num_kv_heads=family.optional_size(hf_config, "num_key_value_heads")
      or heads,
      attention_bias=family.flag(hf_config, "attention_bias", False),
    ),
    "recurrent": AroundConfig(
      head_dim=width // heads,
      attention_bias=True,
      short_convolution=True,
      short_convolution_bias=True,
      short_convolution_activation="none",
      output_gate="gelu_tanh",
      position="none",
    ),
  }
  mechanisms = {
    "attention": AttentionConfig("sliding_window", {"window": (window - 1, 0)}),
    "recurrent": AttentionConfig("rg_lru"),
  }
  rotary.check_unscaled(hf_config)
  positions = rotary.choices(hf_config, _ROTARY)
  config = nested.make(
    ModelConfig,
    kind="decoder",
    num_layers=count,
    num_heads=heads,
    head_dim=features // heads,
    features=features,
    mlp_features=pairs // 2,
    mlp_bias=True,
    gated=True,
    activation="gelu_tanh",
    out_bias=True,
    position="rotary",
    **positions,
    norm="pre",
    norm_kind="rms_from_one",
    norm_epsilon=family.number(hf_config, "rms_norm_eps", 1e-6),
    # Rounded, as in the authors' code.
    embedding_scale=float(jnp.bfloat16(features**0.5)),
    logit_soft_cap=family.positive(hf_config, "logits_soft_cap", 30.0),
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    head=head,
    decoder_attention=tuple(mechanisms[kind] for kind in kinds),
    decoder_around=tuple(override[kind] for kind in kinds),
  )
  vocab_size = family.size(hf_config, "vocab_size", 256000)
  return Description(config, vocab_size, vocab_size, mamba2.LONGEST)


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  mechanisms = config.layers("decoder_attention")
  table = family.table("model.embed_tokens", "target_embedding")
  for i, layer in enumerate(config.decoder_configs):
    theirs, ours = f"model.layers.{i}", f"decoder_{i}"
    table += [
      *family.norm(
        f"{theirs}.temporal_pre_norm", f"{ours}/self_attention_norm"
      ),
      *family.norm(f"{theirs}.channel_pre_norm", f"{ours}/mlp_norm"),
    ]
    for name, part in (("gate", "gate"), ("up", "hidden"), ("down", "out")):
      table += family.linear(
        f"{theirs}.mlp_block.{name}_proj", f"{ours}/mlp/{part}"
      )
    theirs, ours = f"{theirs}.temporal_block", f"{ours}/self_attention"
    if layer.slot.short_convolution:
      table += _recurrent_rows(theirs, ours, layer, mechanisms[i])
      continue
    for name in ("query", "key", "value", "out"):
      table += family.linear(f"{theirs}.{name[0]}_proj", f"{ours}/{name}")
  table += family.norm("model.final_norm", "decoder_norm")
  return table + family.table("lm_head", "output_embedding")


def _recurrent_rows(
  theirs: str, ours: str, layer: ModelConfig, mechanism: AttentionConfig
) -> list[Row]:
  """Returns the rows of a recurrent layer; another mechanism projects everything like x."""
  names = tuple(projection_shapes(mechanism.build(), layer.slot, layer.dims(1)))
  table = [
    *family.linear(f"{theirs}.linear_y", f"{ours}/gate"),
    *family.linear(f"{theirs}.linear_out", f"{ours}/out"),
    *mamba.convolution_rows(f"{theirs}.conv_1d", f"params/{ours}", names),
  ]
  for name, one, layout in (
    ("weight", "kernel", _REPEATED),
    ("bias", "bias", family.SAME),
  ):
    paths = tuple(f"params/{ours}/{x}/{one}" for x in names)
    table.append(Row(f"{theirs}.linear_x.{name}", paths, layout))
  if mechanism.name != "rg_lru":
    return table
  own, heads = f"params/{ours}/attention", layer.num_heads
  by_head = Layout(
    lambda x, n: [x.reshape(heads, -1)], lambda xs: xs[0].reshape(-1)
  )
  return [
    *table,
    Row(f"{theirs}.rg_lru.recurrent_param", (f"{own}/log_rate",), by_head),
    *(
      Row(f"{theirs}.rg_lru.{x}_gate_{y}", (f"{own}/{name}_{kind}",))
      for x, name in (("recurrent", "decay"), ("input", "input"))
      for y, kind in (("weight", "kernel"), ("bias", "bias"))
    ),
  ]


_REPEATED = Layout(lambda x, n: [x.T] * n, lambda xs: xs[0].T)

RECURRENT_GEMMA = Family(
  name="recurrent_gemma",
  architectures={"RecurrentGemmaForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  prefix="model.",
  parts=("embed_tokens", "layers", "final_norm"),
  copies=(("lm_head.weight", "model.embed_tokens.weight"),),
  rotary=_ROTARY,
  without_effect={
    **no_effect(
      "affects only initial weights",
      "final_w_init_variance_scale w_init_variance_scale",
    ),
    **no_effect("follows from block_types", "layer_types layers_block_type"),
    **no_effect(
      "has the same value in the whole family",
      "embeddings_scale_by_sqrt_dim block_type",
    ),
  },
)
"""Decoders with two RG-LRU layers for each layer of windowed attention."""
