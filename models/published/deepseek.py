"""DeepSeek-V3, arXiv:2412.19437, and V3.2, arXiv:2512.02556: latent attention.

V3.2 and GLM-5 also have an indexer, by which each query attends to few keys.
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
from models.published.family import Described, Layout, Row
from models.published.keys import because


def describe(
  theirs: Mapping[str, Any],
  names: Collection[str],
  head: str,
  has_indexer: bool = False,
  own_indexers: Sequence[bool] = (),
) -> Described:
  """Implements `Family.describe`.

  Args:
    theirs: `config.json`.
    names: of its tensors.
    head: ours.
    has_indexer: whether it is V3.2.
    own_indexers: whether each layer has an indexer of its own; empty is all.
  """
  heads = family.size(theirs, "num_attention_heads")
  rank = family.size(theirs, "kv_lora_rank", 512)
  shared = family.size(theirs, "qk_rope_head_dim", 64)
  width = shared + family.size(theirs, "qk_nope_head_dim", 128)
  family.only(
    theirs,
    # Keys and values are of every head, and transformers rotates `head_dim` features.
    num_key_value_heads=heads,
    head_dim=shared,
    qk_head_dim=width,
    # Ours are half a head apart, which the rows of tensors permute.
    rope_interleave=True,
    # The first files have keys that no version of transformers reads.
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    mlp_bias=False,
  )
  has_bias = family.flag(theirs, "attention_bias", False)
  mechanism: Any = latent(rank, shared, has_bias)
  if has_indexer:
    family.per_layer(theirs, "layer_types", ("indexed_attention",))
    options = {
      "top_k": family.size(theirs, "index_topk", 2048),
      "num_index_heads": family.size(theirs, "index_n_heads", 64),
      "index_dim": family.size(theirs, "index_head_dim", 128),
      "query_rank": family.size(theirs, "q_lora_rank", 1536),
      "index_key_norm": True,
      "index_rotary_dim": shared,
    }
    mechanism = AttentionConfig("dsa", options)
    if not all(own_indexers):
      without = AttentionConfig("dsa", {**options, "has_indexer": False})
      mechanism = tuple(mechanism if x else without for x in own_indexers)
  positions = rotary.choices(theirs)
  return llama.describe(
    theirs,
    names,
    head,
    head_dim=width,
    num_kv_heads=None,
    value_dim=family.size(theirs, "v_head_dim", 128),
    query_rank=family.optional_size(theirs, "q_lora_rank", 1536),
    latent_rank=rank,
    shared_key_dim=shared,
    attention_bias=has_bias,
    attention_scale=_scale(width, positions["rotary_scaling"]),
    mlp_bias=False,
    decoder_attention=mechanism,
    **positions,
    **_experts(theirs, has_indexer),
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
  theirs: Mapping[str, Any], names: Collection[str], head: str
) -> Described:
  """Implements `Family.describe` for GLM-5, whose defaults are not V3.2's.

  Some layers reuse the keys that an earlier layer selected.
  """
  filled: Any = ChainMap(cast(Any, theirs), dict(_GLM_DEFAULTS))
  return describe(
    filled, names, head, has_indexer=True, own_indexers=_own_indexers(theirs)
  )


def _own_indexers(theirs: Mapping[str, Any]) -> list[bool]:
  """Whether each layer has an indexer: by a list, a pattern, or every so many layers."""
  count = family.size(theirs, "num_hidden_layers")
  name, pattern = "indexer_types", "index_topk_pattern"
  if theirs.get(name) is None and theirs.get(pattern) is not None:
    name = pattern
  if theirs.get(name) is None:
    every = max(family.value(theirs, "index_topk_freq", int, 1), 1)
    first = family.value(theirs, "index_skip_topk_offset", int, 2)
    return [max(i - first + 1, 0) % every == 0 for i in range(count)]
  given = family.value(theirs, name, str | list[str])
  words = {"F": True, "S": False, "full": True, "shared": False}
  own = [words.get(kind) for kind in given]
  if len(own) != count or None in own or not own[0]:
    raise ValueError(
      f"{name}: expected {count} of full and shared, the first full, got "
      f"{reprlib.repr(given)}"
    )
  return [is_own is True for is_own in own]


def sparse_layers(
  theirs: Mapping[str, Any], default: Callable[[int], bool]
) -> tuple[bool, ...]:
  """Returns whether each layer has experts, from the file or else from the family."""
  kinds = family.per_layer(theirs, "mlp_layer_types", ("dense", "sparse"))
  if kinds is not None:
    return tuple(kind == "sparse" for kind in kinds)
  return tuple(map(default, range(family.size(theirs, "num_hidden_layers"))))


def overrides(is_sparse: Sequence[bool]) -> tuple[AroundConfig, ...]:
  """Returns the overrides of layers of which some have no experts."""
  dense = AroundConfig(num_experts=0)
  return tuple(AroundConfig() if x else dense for x in is_sparse)


def _experts(theirs: Mapping[str, Any], has_types: bool) -> dict[str, Any]:
  """The fields of layers with experts; V3.2 may have the type of each layer."""
  first = family.value(
    theirs, "first_k_dense_replace", Annotated[int, Ge(0)], 3
  )
  if has_types:
    is_sparse = sparse_layers(theirs, lambda i: i >= first)
  else:
    count = family.size(theirs, "num_hidden_layers")
    is_sparse = tuple(i >= first for i in range(count))
  width = family.size(theirs, "moe_intermediate_size", 2048)
  shared = family.size(theirs, "n_shared_experts", 1)
  fields = {
    "num_experts": family.size(theirs, "n_routed_experts", 256),
    "experts_per_token": family.size(theirs, "num_experts_per_tok", 8),
    "expert_groups": family.size(theirs, "n_group", 8),
    "groups_per_token": family.size(theirs, "topk_group", 4),
    "normalize_weights": family.flag(theirs, "norm_topk_prob", True),
    "routed_scale": family.number(theirs, "routed_scaling_factor", 2.5),
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
  """The factor of the logits; YaRN's temperature is squared in it."""
  options = {} if scaling is None else scaling.options
  if not options.get("mscale_all_dim"):
    return None
  length = max(options["factor"], 1.0)
  temperature = 1.0 + 0.1 * options["mscale_all_dim"] * math.log(length)
  return temperature**2 / math.sqrt(width)


def latent(rank: int, shared: int, has_bias: bool) -> AttentionConfig:
  """Returns the mechanism, with a bias of its first projection or without."""
  options = {"rank": rank, "shared_dim": shared, "down_bias": has_bias}
  return AttentionConfig("latent", options)


def rows(config: ModelConfig, has_adjacent: bool = False) -> list[Row]:
  """Implements `Family.rows`: Llama's, with low-rank queries, keys and values.

  Args:
    config: of the model.
    has_adjacent: whether the rotated pairs of an indexer are adjacent in files.
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
    theirs: the name of their module.
    module: the path of ours.
    layer: the config of the layer.
    is_own: whether the mechanism has the projections of keys and values; otherwise the
      module has them, where another mechanism is in it.
    rotated: the features of the shared key whose pairs are adjacent in files.
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
  """The rows of an indexer; the pairs of its first `rotated` features are adjacent.

  Those of other features are half of them apart.
  """
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
    heads: the number of heads.
    layout: of the same Linear if our kernel is `[F, heads · H]`.
  """
  return Layout(
    lambda x, n: [layout.read(x, n)[0].reshape(x.shape[1], heads, -1)],
    lambda xs: layout.write([xs[0].reshape(len(xs[0]), -1)]),
  )


def _keys_and_values(
  heads: int, widths: tuple[int, int], has_axis: bool
) -> Layout:
  """The layout of a Linear that has the key and then the value of each head.

  Ours are the kernels of values and keys; `has_axis` says whether heads are an axis.
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
    **because("is of training", "aux_loss_alpha seq_aux"),
    **because("is of what is returned beside logits", "output_router_logits"),
    **because("is of how the same numbers are computed", "ep_size"),
    **because(
      "is of layers that predict several tokens at once, which transformers leaves "
      "out",
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
    **because("is said by mlp_layer_types", "first_k_dense_replace"),
  },
)
"""Likewise; each query attends to the keys that an indexer scores highest."""

GLM_MOE_DSA = DEEPSEEK_V32._replace(
  name="glm_moe_dsa",
  architectures={"GlmMoeDsaForCausalLM": "tokens"},
  describe=describe_glm,
  rows=partial(rows, has_adjacent=True),
  without_effect={
    **DEEPSEEK_V32.without_effect,
    **because(
      "is said by indexer_types",
      "index_topk_pattern index_topk_freq index_skip_topk_offset",
    ),
  },
  unread=(*llama.LLAMA.unread, r"model\.layers\.78\..*"),
)
"""GLM-5: V3.2, whose indexers rotate adjacent pairs and may serve several layers."""
