"""Mamba, Gu and Dao, arXiv:2312.00752; Falcon Mamba, arXiv:2410.05355."""

from collections.abc import Collection, Mapping
import functools
from typing import Any

import numpy as np

from models.attention_config import AttentionConfig
from models.config import ModelConfig
from models.head_projections import projection_shapes
from models.published import family, mamba2
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from models.short_convolution import WIDTH


def describe(
  hf_config: Mapping[str, Any],
  names: Collection[str],
  head: str,
  *,
  has_norms: bool = False,
) -> Description:
  """Implements `Family.describe`; `has_norms` adds the norms of Falcon Mamba."""
  del names
  features = family.size(hf_config, "hidden_size", 768)
  expand = family.number(hf_config, "expand", 2.0)
  channels = int(expand * features)
  layers = family.size(hf_config, "num_hidden_layers", 32)
  family.only(
    hf_config,
    conv_kernel=WIDTH,
    hidden_act="silu",
    rms_norm=True,
    # With it, transformers 5 rescales weights after reading them.
    rescale_prenorm_residual=False,
  )
  # The authors' files have these sizes under other names as well.
  family.only(
    hf_config,
    "expand · hidden_size",
    intermediate_size=channels,
    d_inner=channels,
  )
  family.only(hf_config, "hidden_size", d_model=features)
  family.only(hf_config, "num_hidden_layers", n_layer=layers)
  rank = hf_config.get("time_step_rank", "auto")
  if rank == "auto":
    rank = -(-features // 16)
  else:
    rank = family.size(hf_config, "time_step_rank")
  options: dict[str, Any] = {
    "state_size": family.size(hf_config, "state_size", 16),
    "rank": rank,
  }
  if has_norms:
    options["norm_epsilon"] = family.positive(hf_config, "mixer_rms_eps", 1e-6)
  return mamba2.describe_gated(
    hf_config,
    family.size(hf_config, "vocab_size", 50280),
    num_layers=layers,
    num_heads=1,
    head_dim=channels,
    features=features,
    attention_bias=family.flag(hf_config, "use_bias", False),
    tie_embeddings=family.flag(hf_config, "tie_word_embeddings", True),
    head=head,
    decoder_attention=AttentionConfig("mamba", options),
  )


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  return [
    *family.table("backbone.embeddings", "target_embedding"),
    *(
      row
      for i, mechanism in enumerate(config.layers("decoder_attention"))
      for row in _layer_rows(config, i, mechanism)
    ),
    *family.norm("backbone.norm_f", "decoder_norm"),
    *family.table("lm_head", "output_embedding"),
  ]


def _layer_rows(
  config: ModelConfig, i: int, mechanism: AttentionConfig
) -> list[Row]:
  """Returns the rows of a layer; another mechanism projects query, key and value like x."""
  theirs, ours = f"backbone.layers.{i}", f"decoder_{i}"
  module = f"params/{ours}/self_attention"
  shapes = projection_shapes(mechanism.build(), config.slot, config.dims(1))
  names = tuple(shapes)
  projected, own = (*names, "gate"), f"{module}/attention"
  table = [
    *family.norm(f"{theirs}.norm", f"{ours}/self_attention_norm"),
    Row(
      f"{theirs}.mixer.in_proj.weight",
      tuple(f"{module}/{name}/kernel" for name in projected),
      Layout(_read_input, lambda xs: _write_input([x.T for x in xs])),
    ),
    Row(
      f"{theirs}.mixer.in_proj.bias",
      tuple(f"{module}/{name}/bias" for name in projected),
      Layout(_read_input, _write_input),
    ),
    *convolution_rows(f"{theirs}.mixer.conv1d", module, names),
    *family.linear(f"{theirs}.mixer.out_proj", f"{ours}/self_attention/out"),
  ]
  if mechanism.name == "mamba":
    rank, state = (mechanism.options[x] for x in ("rank", "state_size"))
    table += [
      Row(
        f"{theirs}.mixer.x_proj.weight",
        tuple(
          f"{own}/{x}" for x in ("step_down", "key_kernel", "query_kernel")
        ),
        _one_head(family.linear_segments((rank, state, state)), 0),
      ),
      Row(
        f"{theirs}.mixer.dt_proj.weight",
        (f"{own}/step_up",),
        _one_head(family.TRANSPOSED, 1),
      ),
      Row(
        f"{theirs}.mixer.A_log",
        (f"{own}/log_rate",),
        _one_head(family.TRANSPOSED, 0),
      ),
      *(
        Row(f"{theirs}.mixer.{x}", (f"{own}/{y}",), _one_head(family.SAME, 0))
        for x, y in (("dt_proj.bias", "step_bias"), ("D", "skip"))
      ),
    ]
  return table


def convolution_rows(
  theirs: str, ours: str, names: tuple[str, ...]
) -> list[Row]:
  """Returns the rows of one convolution, which every projection in `names` uses."""
  return [
    Row(
      f"{theirs}.{their_name}",
      tuple(f"{ours}/{name}_short_convolution/{one}" for name in names),
      layout,
    )
    for their_name, one, layout in (
      ("weight", "kernel", _FILTERS),
      ("bias", "bias", family.SAME),
    )
  ]


def _read_input(x: np.ndarray, n: int) -> list[np.ndarray]:
  """Splits a tensor into x, for each of n − 1 projections, and the gate."""
  first, gate = np.split(x, 2)
  return [*[first.T] * (n - 1), gate.T]


def _write_input(xs: list[np.ndarray]) -> np.ndarray:
  return np.concatenate([xs[0], xs[-1]])


_FILTERS = Layout(
  lambda x, n: [x[:, 0, ::-1].T] * n, lambda xs: xs[0].T[:, None, ::-1]
)
"""A convolution `[F, 1, W]`, whose last tap reads the current position."""


def _one_head(layout: Layout, axis: int) -> Layout:
  """Returns a layout that adds an axis of one head to each of our variables."""
  return Layout(
    lambda x, n: [np.expand_dims(y, axis) for y in layout.read(x, n)],
    lambda xs: layout.write([np.squeeze(y, axis) for y in xs]),
  )


MAMBA = Family(
  name="mamba",
  architectures={"MambaForCausalLM": "tokens"},
  describe=describe,
  rows=rows,
  prefix="backbone.",
  parts=("embeddings", "layers", "norm_f"),
  renamed=(("backbone.embedding.weight", "backbone.embeddings.weight"),),
  copies=(("lm_head.weight", "backbone.embeddings.weight"),),
  without_effect={
    **no_effect(
      "affects only initial weights",
      "time_step_floor time_step_init_scheme time_step_max time_step_min "
      "time_step_scale ssm_cfg",
    ),
    **no_effect(
      "selects an implementation of the same function",
      "fused_add_norm use_associative_scan use_falcon_mambapy use_mambapy",
    ),
    **no_effect("affects only half precision", "residual_in_fp32"),
    **no_effect("follows from vocab_size", "pad_vocab_size_multiple"),
  },
)
"""Decoders of selective state spaces, without feed-forward layers."""

FALCON_MAMBA = MAMBA._replace(
  name="falcon_mamba",
  architectures={"FalconMambaForCausalLM": "tokens"},
  describe=functools.partial(describe, has_norms=True),
  renamed=(),
)
"""Mamba with norms of Δ, B and C."""
