"""DeepSeek-V4, 2026: compressed attention, residual streams, and experts by id."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from annotated_types import Ge
import numpy as np

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import deepseek, experts, family, llama, rotary
from models.published.family import TRANSPOSED, Description, Layout, Row
from models.published.keys import no_effect

_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_STRIDES = MappingProxyType({_SPARSE: 4, _HEAVY: 128})
_ROTARY: rotary.LayerTypes = dict.fromkeys(
  ("main", "compress"),
  rotary.Rotary(
    theta=(), default=None, share=(), default_share=0.125, scaled=False
  ),
)
_SCORES = MappingProxyType(
  {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
)


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  width = family.size(hf_config, "head_dim", 512)
  share = family.size(hf_config, "qk_rope_head_dim", max(width // 8, 1)) / width
  share = family.number(hf_config, "partial_rotary_factor", share)
  rotated = int(width * share)
  source = "head_dim · partial_rotary_factor"
  family.only(hf_config, source, qk_rope_head_dim=rotated)
  family.only(
    hf_config,
    num_key_value_heads=1,
    rms_norm_eps=1e-6,
    n_shared_experts=1,
    norm_topk_prob=True,
    attention_bias=False,
    mlp_bias=False,
  )
  if hf_config.get("quantization_config"):
    raise ValueError(
      "quantization_config: FP8 tensors are not read here; load the folder in "
      "transformers with FineGrainedFP8Config(dequantize=True), and save it"
    )
  count = family.size(hf_config, "num_hidden_layers")
  kinds = family.per_layer(
    hf_config, "layer_types", (llama.NEAR, _SPARSE, _HEAVY)
  )
  if kinds is None:
    kinds = [_HEAVY if i < 2 or i % 2 == 0 else _SPARSE for i in range(count)]
  routers = family.per_layer(hf_config, "mlp_layer_types", ("hash_moe", "moe"))
  if routers is None:
    routers = ["hash_moe" if i < 3 else "moe" for i in range(count)]
  rates = dict(_STRIDES)
  strides = family.value(hf_config, "compress_rates", dict[str, int], rates)
  for kind in sorted(strides.keys() - _STRIDES.keys()):
    raise ValueError(
      f"compress_rates: expected layer types among {[*_STRIDES]}, got {kind!r}"
    )
  positions = _positions(hf_config, share)
  rank = family.size(hf_config, "q_lora_rank", 1024)
  near = family.size(hf_config, "sliding_window", 128)
  window = {"window": near, "rotary_dim": rotated}
  index = {
    "top_k": family.size(hf_config, "index_topk", 512),
    "num_index_heads": family.size(hf_config, "index_n_heads", 64),
    "index_dim": family.size(hf_config, "index_head_dim", 128),
    "query_rank": rank,
  }

  def mechanism(kind):
    if kind == llama.NEAR:
      return AttentionConfig("compressed", {**window, "stride": 0})
    if (stride := strides.get(kind, 0)) < 1:
      raise ValueError(
        f"compress_rates: expected a number above 0 for {kind}, got {strides}"
      )
    options = index if kind == _SPARSE else {}
    own = {**window, "stride": stride, **options}
    return AttentionConfig("compressed", own)

  experts_width = family.size(hf_config, "moe_intermediate_size", 2048)
  vocab_size = family.size(hf_config, "vocab_size")
  scores = family.choice(hf_config, "scoring_func", _SCORES, "sqrtsoftplus")
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=width,
    num_kv_heads=None,
    attention_bias=False,
    mlp_bias=False,
    mlp_features=experts_width,
    query_rank=rank,
    out_groups=family.size(hf_config, "o_groups", 8),
    out_rank=family.size(hf_config, "o_lora_rank", 1024),
    # A single stream would have weights in transformers, but has none here.
    streams=family.value(hf_config, "hc_mult", Annotated[int, Ge(2)], 4),
    stream_steps=family.size(hf_config, "hc_sinkhorn_iters", 20),
    stream_epsilon=family.number(hf_config, "hc_eps", 1e-6),
    num_experts=family.size(hf_config, "n_routed_experts", 256),
    experts_per_token=family.size(hf_config, "num_experts_per_tok", 6),
    routed_scale=family.positive(hf_config, "routed_scaling_factor", 1.5),
    shared_features=experts_width,
    router_scores=_SCORES[scores],
    selection_bias=True,
    gate_limit=family.positive(hf_config, "swiglu_limit", 10.0),
    decoder_attention=tuple(map(mechanism, kinds)),
    decoder_around=tuple(
      AroundConfig(
        router_table=vocab_size if router == "hash_moe" else 0,
        **positions["main" if kind == llama.NEAR else "compress"],
      )
      for kind, router in zip(kinds, routers, strict=True)
    ),
  )


def _positions(
  hf_config: Mapping[str, Any], share: float
) -> dict[str, dict[str, Any]]:
  """Returns the fields of the rotary positions of both layer types.

  A file with one set of parameters has it for layers with entries.
  """
  one = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
  thetas = {
    "main": family.number(hf_config, "rope_theta", 10000.0),
    "compress": family.number(hf_config, "compress_rope_theta", 160000.0),
  }
  sets = one
  if not {*one} & {*_ROTARY}:
    own = {"main": {}, "compress": {"attention_factor": 1.0, **one}}
    if one.get("rope_type", one.get("type", "default")) == "default":
      own["compress"] = dict(one)
    sets = {
      kind: {**own[kind], "rope_theta": theta, "partial_rotary_factor": share}
      for kind, theta in thetas.items()
    }
  length = family.size(hf_config, "max_position_embeddings")
  given = {"rope_parameters": sets, "max_position_embeddings": length}
  fields = {}
  for kind in thetas:
    fields[kind] = rotary.choices(given, _ROTARY, kind)
    scaling = fields[kind]["rotary_scaling"]
    factor = scaling.options.get("attention_factor") if scaling else None
    is_yarn = scaling and scaling.rope_type == "yarn"
    if fields[kind].pop("rotary_fraction") != share:
      raise ValueError(
        f"rope_parameters: expected partial_rotary_factor {share} in {kind}"
      )
    if is_yarn and factor != 1.0:
      raise ValueError(
        f"rope_parameters: expected attention_factor 1.0 in {kind}, got {factor}"
      )
  return fields


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  table = family.table("model.embed_tokens", "target_embedding")
  table += family.table("head", "output_embedding")
  table += family.norm("model.norm", "decoder_norm")
  theirs, ours = "model.layers.{i}", "decoder_{i}"
  for name, norm in (("attn", "self_attention"), ("ffn", "mlp")):
    table += family.norm(f"{theirs}.{name}_norm", f"{ours}/{norm}_norm")
    table += _streams(f"{theirs}.hc_{name}", f"{ours}/{norm}_streams")
  table += _streams("model.hc_head.hc", "decoder_streams")
  ffn = f"{theirs}.ffn"
  table += experts.rows(config, ffn, experts.MIXTRAL_KERNELS)
  table += experts.shared_rows(f"{ffn}.shared_experts", experts.MIXTRAL_KERNELS)
  for i, layer in enumerate(config.decoder_configs):
    gate, mlp = f"model.layers.{i}.ffn.gate", f"constants/decoder_{i}/mlp"
    table += [
      Row(f"{gate}.tid2eid", (f"{mlp}/router_table",), _INT64),
      Row(f"{gate}.bias", (f"{mlp}/selection_bias",)),
    ]
    own = config.layers("decoder_attention")[i]
    table += _attention(i, layer, own)
  return table


def _streams(theirs: str, ours: str) -> list[Row]:
  """Returns the rows of the weights that mix residual streams."""
  return [
    Row(f"{theirs}_fn", (f"params/{ours}/kernel",), TRANSPOSED),
    Row(f"{theirs}_base", (f"params/{ours}/bias",)),
    Row(f"{theirs}_scale", (f"params/{ours}/scale",)),
  ]


def _attention(
  i: int, config: ModelConfig, mechanism: AttentionConfig
) -> list[Row]:
  """Returns the rows of the attention of layer i; files store adjacent rotary pairs."""
  theirs, module = f"model.layers.{i}.attn", f"decoder_{i}/self_attention"
  own, width = f"params/{module}/attention", config.query_dim
  options = mechanism.options
  rotated = options.get("rotary_dim", 0)
  pairs = rotary.adjacent_pairs(width, rotated)
  groups = config.slot.out_groups or 1
  table = [
    *family.linear(f"{theirs}.wq_a", f"{module}/query_down"),
    *family.norm(f"{theirs}.q_norm", f"{module}/query_down_norm"),
    Row(f"{theirs}.wq_b.weight", (f"params/{module}/query/kernel",), pairs),
    Row(
      f"{theirs}.wo_a.weight",
      (f"params/{module}/out_down",),
      _grouped_layout(groups, pairs),
    ),
    *family.linear(f"{theirs}.wo_b", f"{module}/out"),
  ]
  # Another mechanism, or other sizes.
  if mechanism.name != "compressed" or not rotated:
    # Each head starts with a copy of the shared keys and values.
    both = (f"params/{module}/{name}/kernel" for name in ("value", "key"))
    start = _copied_layout(config.num_heads, pairs)
    row = Row(f"{theirs}.wkv.weight", tuple(both), start, is_start=True)
    return [*table, row]
  series = 2 if "top_k" in options else 1
  table += [
    Row(f"{theirs}.wkv.weight", (f"{own}/kv_kernel",), pairs),
    Row(f"{theirs}.norm.weight", (f"{own}/kv_scale",), pairs),
    Row(f"{theirs}.attn_sink", (f"{own}/sinks",)),
    *_entries(f"{theirs}.compressor", f"{own}/entry", series, pairs),
  ]
  if "top_k" in options:
    index = f"{own}/index"
    pairs = rotary.adjacent_pairs(options["index_dim"], rotated)
    heads = deepseek.by_head(options["num_index_heads"], pairs)
    table += [
      *_entries(f"{theirs}.indexer.compressor", index, series, pairs),
      Row(f"{theirs}.indexer.wq_b.weight", (f"{index}_query_kernel",), heads),
      Row(
        f"{theirs}.indexer.weights_proj.weight",
        (f"{index}_weight_kernel",),
        TRANSPOSED,
      ),
    ]
  return table


def _entries(theirs: str, ours: str, series: int, pairs: Layout) -> list[Row]:
  """Returns the rows of the weights that compress positions into entries."""
  by_series = deepseek.by_head(series, pairs)
  return [
    Row(f"{theirs}.wkv.weight", (f"{ours}_kernel",), by_series),
    Row(f"{theirs}.wgate.weight", (f"{ours}_gate_kernel",), by_series),
    Row(
      f"{theirs}.ape",
      (f"{ours}_bias",),
      Layout(
        lambda x, n: by_series.read(x.T, n), lambda xs: by_series.write(xs).T
      ),
    ),
    Row(f"{theirs}.norm.weight", (f"{ours}_scale",), pairs),
  ]


def _copied_layout(heads: int, pairs: Layout) -> Layout:
  """Returns the layout of a one-head Linear that is copied to all of our heads."""
  return Layout(
    lambda x, n: [np.tile(pairs.read(x, 1)[0], heads)] * n,
    lambda xs: pairs.write([xs[0][:, : xs[0].shape[1] // heads]]),
  )


def _grouped_layout(groups: int, pairs: Layout) -> Layout:
  """Returns the layout of a Linear that projects the output of each group of heads."""

  def read(x, n):
    x = pairs.read(x.T, n)[0]  # [groups · rank, features of a group]
    return [x.reshape(groups, -1, x.shape[1]).swapaxes(1, 2)]

  def write(xs):
    x = xs[0].swapaxes(1, 2)
    return pairs.write([x.reshape(-1, x.shape[2])]).T

  return Layout(read, write)


_INT64 = Layout(
  lambda x, n: [x.astype("int32")], lambda xs: xs[0].astype("int64")
)
"""64-bit integers in files, 32-bit integers in our variables."""

DEEPSEEK_V4 = llama.LLAMA._replace(
  name="deepseek_v4",
  architectures={"DeepseekV4ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  parts=("embed_tokens", "layers", "norm", "hc_head"),
  copies=(("head.weight", "model.embed_tokens.weight"),),
  rotary=None,
  without_effect={
    **deepseek.DEEPSEEK_V3.without_effect,
    **no_effect("affects only training", "router_jitter_noise"),
  },
  unread=(*llama.LLAMA.unread, r"(model\.)?mtp\..*"),
)
"""Decoders with compressed attention, residual streams and hash routing."""
