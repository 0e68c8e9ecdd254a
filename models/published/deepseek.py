"""DeepSeek-V3, arXiv:2412.19437, and V3.2, arXiv:2512.02556: latent attention.

V3.2 and GLM-5 also have an indexer that selects a few keys for each query.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
import math
import reprlib
from types import MappingProxyType
from typing import Annotated, Any, cast

from annotated_types import Ge
import numpy as np

from models.attention_config import AttentionConfig
from models.attention_module_config import AroundConfig
from models.config import ModelConfig
from models.published import experts, family, llama, rotary
from models.published.family import Description, Layout, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  has_indexer: bool = False,
  own_indexers: Sequence[bool] = (),
) -> Description:
  """Implements `Family.describe`.

  Args:
    hf_config: `config.json`.
    names: names of the tensors.
    head: our name of the head.
    has_indexer: whether layers have indexers (V3.2).
    own_indexers: whether each layer has its own indexer; empty means that all do.
  """
  heads = family.size(hf_config, "num_attention_heads")
  rank = family.size(hf_config, "kv_lora_rank", 512)
  shared = family.size(hf_config, "qk_rope_head_dim", 64)
  width = shared + family.size(hf_config, "qk_nope_head_dim", 128)
  # Every head has its own keys and values.
  family.only(hf_config, "num_attention_heads", num_key_value_heads=heads)
  # transformers rotates `head_dim` features.
  family.only(hf_config, "qk_rope_head_dim", head_dim=shared)
  family.only(
    hf_config,
    # Files store adjacent pairs; `rows` permutes them into our halves.
    rope_interleave=True,
    # The first files have keys that no version of transformers reads.
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    mlp_bias=False,
  )
  has_bias = family.flag(hf_config, "attention_bias", False)
  mechanism: Any = latent(rank, shared, has_bias)
  if has_indexer:
    family.per_layer(hf_config, "layer_types", ("indexed_attention",))
    options = {
      "top_k": family.size(hf_config, "index_topk", 2048),
      "num_index_heads": family.size(hf_config, "index_n_heads", 64),
      "index_dim": family.size(hf_config, "index_head_dim", 128),
      "query_rank": family.size(hf_config, "q_lora_rank", 1536),
      "index_key_norm": True,
      "index_rotary_dim": shared,
    }
    mechanism = AttentionConfig("dsa", options)
    if not all(own_indexers):
      without = AttentionConfig("dsa", {**options, "has_indexer": False})
      mechanism = tuple(mechanism if x else without for x in own_indexers)
  positions = rotary.choices(hf_config)
  return llama.describe(
    hf_config,
    names,
    head,
    head_dim=width,
    num_kv_heads=None,
    value_dim=family.size(hf_config, "v_head_dim", 128),
    query_rank=family.optional_size(hf_config, "q_lora_rank", 1536),
    latent_rank=rank,
    shared_key_dim=shared,
    attention_bias=has_bias,
    attention_scale=_scale(width, positions["rotary_scaling"]),
    mlp_bias=False,
    decoder_attention=mechanism,
    **positions,
    **_experts(hf_config, has_indexer),
  )


_GLM_DEFAULTS = MappingProxyType(
  {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
  }
)


def describe_glm(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe` for GLM-5, which has other defaults than V3.2.

  Some layers reuse the keys that an earlier layer selected.
  """
  filled: Any = ChainMap(cast(Any, hf_config), dict(_GLM_DEFAULTS))
  return describe(
    filled, names, head, has_indexer=True, own_indexers=_own_indexers(hf_config)
  )


def _own_indexers(hf_config: Mapping[str, Any]) -> list[bool]:
  """Returns whether each layer has an indexer, from a list, a pattern or a period."""
  count = family.size(hf_config, "num_hidden_layers")
  name, pattern = "indexer_types", "index_topk_pattern"
  if hf_config.get(name) is None and hf_config.get(pattern) is not None:
    name = pattern
  if hf_config.get(name) is None:
    every = max(family.value(hf_config, "index_topk_freq", int, 1), 1)
    first = family.value(hf_config, "index_skip_topk_offset", int, 2)
    return [max(i - first + 1, 0) % every == 0 for i in range(count)]
  given = family.value(hf_config, name, str | list[str])
  words = {"F": True, "S": False, "full": True, "shared": False}
  own = [words.get(kind) for kind in given]
  if len(own) != count or None in own or not own[0]:
    raise ValueError(
      f"{name}: expected {count} (num_hidden_layers) entries, full or shared, "
      f"starting with full, got {reprlib.repr(given)}"
    )
  return [is_own is True for is_own in own]


def sparse_layers(
  hf_config: Mapping[str, Any], default: Callable[[int], bool]
) -> tuple[bool, ...]:
  """Returns whether each layer has experts, from the file or by default."""
  kinds = family.per_layer(hf_config, "mlp_layer_types", ("dense", "sparse"))
  if kinds is not None:
    return tuple(kind == "sparse" for kind in kinds)
  return tuple(map(default, range(family.size(hf_config, "num_hidden_layers"))))


def overrides(is_sparse: Sequence[bool]) -> tuple[AroundConfig, ...]:
  """Returns the overrides of layers, some of which have no experts."""
  dense = AroundConfig(num_experts=0)
  return tuple(AroundConfig() if x else dense for x in is_sparse)


def _experts(hf_config: Mapping[str, Any], has_types: bool) -> dict[str, Any]:
  """Returns the fields of layers with experts; V3.2 may list the type of each layer."""
  first = family.value(
    hf_config, "first_k_dense_replace", Annotated[int, Ge(0)], 3
  )
  if has_types:
    is_sparse = sparse_layers(hf_config, lambda i: i >= first)
  else:
    count = family.size(hf_config, "num_hidden_layers")
    is_sparse = tuple(i >= first for i in range(count))
  width = family.size(hf_config, "moe_intermediate_size", 2048)
  shared = family.size(hf_config, "n_shared_experts", 1)
  fields = {
    "num_experts": family.size(hf_config, "n_routed_experts", 256),
    "experts_per_token": family.size(hf_config, "num_experts_per_tok", 8),
    "expert_groups": family.size(hf_config, "n_group", 8),
    "groups_per_token": family.size(hf_config, "topk_group", 4),
    "normalize_weights": family.flag(hf_config, "norm_topk_prob", True),
    "routed_scale": family.positive(hf_config, "routed_scaling_factor", 2.5),
  }
  if not any(is_sparse):
    return {}
  return {
    **fields,
    "expert_features": width,
    "shared_features": shared * width,
    "router_scores": "sigmoid",
    "selection_bias": True,
    "decoder_around": overrides(is_sparse),
  }


def _scale(width: int, scaling: Any) -> float | None:
  """Returns the scale of the logits, with the square of YaRN's temperature."""
  options = {} if scaling is None else scaling.options
  if not options.get("mscale_all_dim"):
    return None
  length = max(options["factor"], 1.0)
  temperature = 1.0 + 0.1 * options["mscale_all_dim"] * math.log(length)
  return temperature**2 / math.sqrt(width)


def latent(rank: int, shared: int, has_bias: bool) -> AttentionConfig:
  """Returns the mechanism; `has_bias` adds a bias to its first projection."""
  options = {"rank": rank, "shared_dim": shared, "down_bias": has_bias}
  return AttentionConfig("latent", options)


def rows(config: ModelConfig, has_adjacent: bool = False) -> list[Row]:
  """Implements `Family.rows`: those of Llama, with low-rank queries, keys and values.

  Args:
    config: config of the model.
    has_adjacent: whether files store the rotary pairs of an indexer adjacently.
  """
  table = [row for row in llama.rows() if "self_attn" not in row.theirs]
  table += experts.rows(config) + experts.selection_rows(config)
  table += experts.shared_rows("model.layers.{i}.mlp.shared_experts")
  slot = config.slot
  rank, shared = slot.latent_rank or 0, slot.shared_key_dim or 0
  own = latent(rank, shared, slot.attention_bias)
  for i, mechanism in enumerate(config.layers("decoder_attention")):
    theirs, module = (
      f"model.layers.{i}.self_attn",
      f"decoder_{i}/self_attention",
    )
    table += latent_rows(theirs, module, config, mechanism == own, shared)
    # An indexer that replaces another mechanism has no low-rank queries.
    if mechanism.name == "dsa" and "query_rank" in mechanism.options:
      index = f"params/{module}/attention/index"
      rotated = shared if has_adjacent else 0
      table += _index_rows(theirs, index, mechanism, rotated)
  return table


def latent_rows(
  theirs: str, module: str, layer: ModelConfig, is_own: bool, rotated: int
) -> list[Row]:
  """Returns the rows of latent attention.

  Args:
    theirs: name of the module in transformers.
    module: path of our module.
    layer: config of the layer.
    is_own: whether the mechanism has the projections of keys and values; if another
      mechanism replaces it, the module has them.
    rotated: number of features of the shared key that files store as adjacent pairs.
  """
  slot, width = layer.slot, layer.query_dim
  rank, shared = slot.latent_rank or 0, slot.shared_key_dim or 0
  query = "q_proj" if slot.query_rank is None else "q_b_proj"
  names = (
    *("attention/down_kernel", "attention/down_bias", "attention/norm_scale"),
    *("attention/value_kernel", "attention/key_kernel"),
  )
  if not is_own:
    names = (
      *("latent_down/kernel", "latent_down/bias", "latent_down_norm/scale"),
      *("value/kernel", "key/kernel"),
    )
  down, bias, scale, value, key = (f"params/{module}/{name}" for name in names)
  layout = rotary.adjacent_pairs(rank + shared, rotated)
  widths = width - shared, slot.value_dim or width
  both = _keys_and_values(layer.num_heads, widths, is_own)
  return [
    *family.linear(f"{theirs}.o_proj", f"{module}/out"),
    *family.linear(f"{theirs}.q_a_proj", f"{module}/query_down"),
    *family.norm(f"{theirs}.q_a_layernorm", f"{module}/query_down_norm"),
    Row(
      f"{theirs}.{query}.weight",
      (f"params/{module}/query/kernel",),
      rotary.adjacent_pairs(width, rotated),
    ),
    Row(f"{theirs}.kv_a_proj_with_mqa.weight", (down,), layout),
    Row(f"{theirs}.kv_a_proj_with_mqa.bias", (bias,), layout),
    Row(f"{theirs}.kv_a_layernorm.weight", (scale,)),
    Row(f"{theirs}.kv_b_proj.weight", (value, key), both),
  ]


def _index_rows(
  theirs: str, ours: str, mechanism: AttentionConfig, rotated: int
) -> list[Row]:
  """Returns the rows of an indexer, whose first `rotated` features are adjacent pairs."""
  heads = mechanism.options["num_index_heads"]
  width = mechanism.options["index_dim"]
  key = rotary.adjacent_pairs(width, rotated, at_end=False)
  parts = {
    "wq_b.weight": ("query_kernel", by_head(heads, key)),
    "wk.weight": ("key_kernel", key),
    "k_norm.weight": ("key_scale", key),
    "k_norm.bias": ("key_bias", key),
    "weights_proj.weight": ("weight_kernel", family.TRANSPOSED),
  }
  return [
    Row(f"{theirs}.indexer.{name}", (f"{ours}_{own}",), layout)
    for name, (own, layout) in parts.items()
  ]


def by_head(heads: int, layout: Layout = family.TRANSPOSED) -> Layout:
  """Returns the layout of a Linear whose heads are an axis of our kernel.

  Args:
    heads: number of heads.
    layout: layout of the same Linear for a kernel `[F, heads · H]`.
  """
  return Layout(
    lambda x, n: [layout.read(x, n)[0].reshape(x.shape[1], heads, -1)],
    lambda xs: layout.write([xs[0].reshape(len(xs[0]), -1)]),
  )


def _keys_and_values(
  heads: int, widths: tuple[int, int], has_axis: bool
) -> Layout:
  """Returns the layout of a Linear with the key and then the value of each head.

  The variables are the kernels of values and keys; `has_axis` is whether heads are an
  axis of them.
  """
  key_dim, value_dim = widths

  def read(x, n):
    del n
    both = np.moveaxis(x.reshape(heads, key_dim + value_dim, -1), 2, 0)
    parts = both[:, :, key_dim:], both[:, :, :key_dim]
    return [x if has_axis else x.reshape(len(x), -1) for x in parts]

  def write(xs):
    value, key = (x.reshape(len(x), heads, -1) for x in xs)
    both = np.moveaxis(np.concatenate([key, value], axis=2), 0, 2)
    return both.reshape(heads * (key_dim + value_dim), -1)

  return Layout(read, write)


DEEPSEEK_V3 = llama.LLAMA._replace(
  name="deepseek_v3",
  architectures={"DeepseekV3ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  without_effect={
    **no_effect("affects only training", "aux_loss_alpha seq_aux"),
    **no_effect("selects outputs other than logits", "output_router_logits"),
    **no_effect("selects an implementation of the same function", "ep_size"),
    **no_effect("follows from other keys", "qk_head_dim"),
    **no_effect(
      "belongs to multi-token prediction layers, which transformers omits",
      "num_nextn_predict_layers num_mtp_layers",
    ),
  },
  unread=(*llama.LLAMA.unread, r"model\.layers\.61\..*"),
)
"""Latent attention with low-rank queries, and YaRN's temperature in the logits."""


DEEPSEEK_V32 = DEEPSEEK_V3._replace(
  name="deepseek_v32",
  architectures={"DeepseekV32ForCausalLM": "tokens"},
  describe=partial(describe, has_indexer=True),
  without_effect={
    **DEEPSEEK_V3.without_effect,
    **no_effect("follows from mlp_layer_types", "first_k_dense_replace"),
  },
)
"""DeepSeek-V3 whose queries attend to the keys that an indexer scores highest."""

GLM_MOE_DSA = DEEPSEEK_V32._replace(
  name="glm_moe_dsa",
  architectures={"GlmMoeDsaForCausalLM": "tokens"},
  describe=describe_glm,
  rows=partial(rows, has_adjacent=True),
  without_effect={
    **DEEPSEEK_V32.without_effect,
    **no_effect(
      "follows from indexer_types",
      "index_topk_pattern index_topk_freq index_skip_topk_offset",
    ),
  },
  unread=(*llama.LLAMA.unread, r"model\.layers\.78\..*"),
)
"""GLM-5: V3.2 with indexers that rotate adjacent pairs and that layers may share."""
