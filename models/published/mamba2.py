"""Mamba-2: Dao and Gu, arXiv:2405.21060."""

from collections.abc import Collection, Mapping
import math
import reprlib
from typing import Any

from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.published import family
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  family.only(
    hf_config,
    conv_kernel=WIDTH,
    hidden_act="silu",
    rms_norm=True,
    # With it, transformers 5 rescales weights after reading them.
    rescale_prenorm_residual=False,
  )
  features = family.size(hf_config, "hidden_size", 4096)
  heads = family.size(hf_config, "num_heads", 128)
  groups = family.size(hf_config, "n_groups", 8)
  value_dim = family.size(hf_config, "head_dim", 64)
  expand = family.number(hf_config, "expand", 2.0)
  if int(expand * features) != heads * value_dim:
    raise ValueError(
      f"num_heads: expected expand · hidden_size / head_dim = "
      f"{expand * features / value_dim:g}, got {heads}"
    )
  family.check_divisor("n_groups", groups, "num_heads", heads)
  has_bias = family.flag(hf_config, "use_bias", False)
  options = {"projection_bias": True} if has_bias else {}
  options |= step_limits(hf_config)
  return describe_gated(
    hf_config,
    family.size(hf_config, "vocab_size", 32768),
    num_layers=family.size(hf_config, "num_hidden_layers", 64),
    num_heads=heads,
    num_qk_heads=groups,
    head_dim=family.size(hf_config, "state_size", 128),
    value_dim=value_dim,
    features=features,
    output_norm="rms_joint" if groups == 1 else "rms_grouped",
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", False),
    head=head,
    attention_bias=has_bias,
    decoder_attention=AttentionConfig(_OWN, options),
  )


def mixer(heads: int, groups: int, **others: Any) -> dict[str, Any]:
  """Returns the fields of a gated layer of Mamba-2.

  Args:
    heads: number of value heads.
    groups: number of query and key heads, and of groups of the norm.
    **others: further config fields.
  """
  return {
    "num_heads": heads,
    "num_kv_heads": heads,
    "num_qk_heads": groups,
    "short_convolution": True,
    "output_norm": "rms_joint" if groups == 1 else "rms_grouped",
    "output_gate": "silu",
    **others,
  }


def step_limits(hf_config: Mapping[str, Any]) -> dict[str, float]:
  """Returns the options of Mamba-2 that bound Δ, from `time_step_limit`."""
  given = hf_config.get("time_step_limit", [0.0, math.inf])
  try:
    # Files may write infinity as text, or as an object with the text.
    low, high = (
      float(x["__float__"] if isinstance(x, dict) else x) for x in given
    )
  except (KeyError, TypeError, ValueError):
    low, high = math.nan, math.nan
  if not 0.0 <= low <= high or math.isinf(low):
    raise ValueError(
      "time_step_limit: expected two increasing numbers of at least 0, got "
      f"{reprlib.repr(given)}"
    )
  options = {"min_step": low} if low else {}
  return options if math.isinf(high) else {**options, "max_step": high}


def describe_gated(
  hf_config: Mapping[str, Any], vocab_size: int, **others: Any
) -> Description:
  """Describes gated layers with a convolution, without feed-forward layers.

  Args:
    hf_config: `config.json`.
    vocab_size: number of ids.
    **others: config fields in which Mamba and Mamba-2 differ.
  """
  config = nested.make(
    ModelConfig,
    kind="decoder",
    mlp_features=0,
    short_convolution=True,
    short_convolution_bias=family.flag(hf_config, "use_conv_bias", True),
    output_gate="silu",
    position="none",
    norm="pre",
    norm_kind="rms",
    norm_epsilon=family.number(hf_config, "layer_norm_epsilon", 1e-5),
    embedding_scale=1.0,
    **others,
  )
  # Without positions, there is no longest sequence.
  return Description(config, vocab_size, vocab_size, LONGEST)


_OWN = "mamba2"
LONGEST = 2**20
"""A limit for models without positions, which need none."""


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  return [
    *family.table("backbone.embeddings", "target_embedding"),
    *(
      row
      for i, mechanism in enumerate(config.layers("decoder_attention"))
      for row in (
        *family.norm(
          f"backbone.layers.{i}.norm", f"decoder_{i}/self_attention_norm"
        ),
        *mixer_rows(
          f"backbone.layers.{i}.mixer",
          f"decoder_{i}/self_attention",
          config,
          mechanism.name == _OWN,
        ),
      )
    ),
    *family.norm("backbone.norm_f", "decoder_norm"),
    *family.table("lm_head", "output_embedding"),
  ]


def mixer_rows(
  theirs: str, ours: str, config: ModelConfig, is_own: bool
) -> list[Row]:
  """Returns the rows of a mixer; value, key and query are x, B and C in its tensors.

  Args:
    theirs: name of the module in transformers.
    ours: path of our module.
    config: config of the layer.
    is_own: whether the mechanism is Mamba-2. Another mechanism reads no part of
      `in_proj`, even if its variables have the same names.
  """
  module = f"params/{ours}"
  values = config.num_heads * (config.slot.value_dim or config.query_dim)
  shared = (config.slot.num_qk_heads or config.num_heads) * config.query_dim
  names = ("value", "key", "query")
  convolved = tuple(f"{module}/{name}_short_convolution" for name in names)
  projected = tuple(f"{module}/{name}/kernel" for name in ("gate", *names))
  sizes = (values, shared, shared)
  own = f"{module}/attention"
  steps = (f"{own}/step_kernel",) if is_own else ()
  biases = tuple(f"{module}/{name}/bias" for name in ("gate", *names))
  biases += (f"{own}/projection_bias",) if is_own else ()
  table = [
    Row(
      f"{theirs}.in_proj.weight",
      projected + steps,
      family.linear_segments((values, *sizes, config.num_heads)),
    ),
    Row(
      f"{theirs}.in_proj.bias",
      biases,
      family.segments((values, *sizes, config.num_heads)),
    ),
    Row(
      f"{theirs}.conv1d.weight",
      tuple(f"{one}/kernel" for one in convolved),
      filters(sizes),
    ),
    Row(
      f"{theirs}.conv1d.bias",
      tuple(f"{one}/bias" for one in convolved),
      family.segments(sizes),
    ),
    Row(
      f"{theirs}.norm.weight",
      (f"{module}/out_norm/scale",),
      _norm(config),
    ),
    *family.linear(f"{theirs}.out_proj", f"{ours}/out"),
  ]
  if is_own:
    table += [
      Row(f"{theirs}.dt_bias", (f"{own}/step_bias",)),
      Row(f"{theirs}.A_log", (f"{own}/log_rate",)),
      Row(f"{theirs}.D", (f"{own}/skip",)),
    ]
  return table


def _norm(config: ModelConfig) -> Layout:
  """Returns the layout of the scales of a norm over each group of heads."""
  if config.slot.output_norm.startswith("rms_joint"):
    return family.SAME
  groups = config.slot.num_qk_heads or config.num_heads
  return Layout(
    lambda x, n: [x.reshape(groups, -1)], lambda xs: xs[0].reshape(-1)
  )


def filters(sizes: tuple[int, ...]) -> Layout:
  """Returns the layout that concatenates filters `[F, 1, W]` of these sizes.

  The last tap reads the current position.
  """
  one = family.segments(sizes)
  return Layout(
    lambda x, n: [part[:, 0, ::-1].T for part in one.read(x, n)],
    lambda xs: one.write([x.T[:, None, ::-1] for x in xs]),
  )


MAMBA2 = Family(
  name="mamba2",
  architectures={"Mamba2ForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  prefix="backbone.",
  parts=("embeddings", "layers", "norm_f"),
  copies=(("lm_head.weight", "backbone.embeddings.weight"),),
  without_effect={
    **no_effect(
      "affects only initial weights",
      "time_step_floor time_step_max time_step_min time_step_rank",
    ),
    **no_effect("selects an implementation of the same function", "chunk_size"),
    **no_effect("affects only half precision", "residual_in_fp32"),
    **no_effect(
      "is not read by any version of transformers", "norm_before_gate"
    ),
  },
)
"""Decoders of state space layers whose heads share queries and keys."""
