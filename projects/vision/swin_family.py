"""Swin: Liu et al., arXiv:2103.14030."""

from collections.abc import Collection, Iterator, Mapping
import itertools
from typing import Any

import numpy as np

from models.attention_config import AttentionConfig
from models.published import family
from models.published.bert import num_labels
from models.published.family import Description, Family, Row
from models.published.keys import no_effect
from projects.vision.pyramid_config import PyramidConfig
from projects.vision.vit_family import PIXELS, patch_rows

_BLOCK = "swin.encoder.layers.{stage}.blocks.{layer}"

_MASKED_LOGIT = -100.0
"""The number that published models add to masked logits."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names, head
  family.only(
    hf_config, qkv_bias=True, use_absolute_embeddings=False, layer_norm_eps=1e-5
  )
  side = family.size(hf_config, "image_size", 224)
  patch = family.size(hf_config, "patch_size", 4)
  window = family.size(hf_config, "window_size", 7)
  depths = family.sizes(hf_config, "depths", [2, 2, 6, 2])
  family.only(hf_config, num_layers=len(depths))
  width = family.size(hf_config, "embed_dim", 96)
  features = tuple(width * 2**i for i in range(len(depths)))
  ratio = family.number(hf_config, "mlp_ratio", 4.0)
  windows = [
    AttentionConfig(
      "window_2d",
      {"window": window, "shift": shift, "hidden_logit": _MASKED_LOGIT},
    )
    for shift in (0, window // 2)
  ]
  config = PyramidConfig(
    depths=depths,
    num_heads=family.sizes(hf_config, "num_heads", [3, 6, 12, 24]),
    features=features,
    mlp_features=tuple(int(ratio * width) for width in features),
    patch_size=(patch,),
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    dropout_rate=family.number(hf_config, "hidden_dropout_prob", 0.0),
    image_shape=(side, side, family.size(hf_config, "num_channels", 3)),
    encoder_attention=tuple(windows),
  )
  for rows, columns in config.grids(side, side):
    if rows % window or columns % window:
      raise ValueError(
        f"window_size: expected windows that fill the grid of every stage; one "
        f"has {rows} × {columns} tokens, got {window}"
      )
  shape = config.image_shape
  return Description(config, 0, num_labels(hf_config), 0, {"image": shape})


def block_rows(theirs: str, ours: str) -> Iterator[Row]:
  """Yields the rows of the norms and the feed-forward layer of a block."""
  yield from family.norm(
    f"{theirs}.layernorm_before", f"{ours}/self_attention_norm"
  )
  yield from family.norm(f"{theirs}.layernorm_after", f"{ours}/mlp_norm")
  yield from family.linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/hidden")
  yield from family.linear(f"{theirs}.output.dense", f"{ours}/mlp/out")


def blocks(config: PyramidConfig, theirs: str) -> Iterator[tuple[str, str]]:
  """Yields the name of each block in published tensors and in this library."""
  ours = itertools.count()
  for stage, depth in enumerate(config.depths):
    for layer in range(depth):
      yield theirs.format(stage=stage, layer=layer), f"encoder_{next(ours)}"


def _rows(config: PyramidConfig) -> Iterator[Row]:
  embeddings = "swin.embeddings"
  projection = f"{embeddings}.patch_embeddings.projection"
  yield from patch_rows(projection, "patches_0")
  yield from family.norm(f"{embeddings}.norm", "patches_0/norm")
  for theirs, ours in blocks(config, _BLOCK):
    attention, module = f"{theirs}.attention", f"{ours}/self_attention"
    for name in ("query", "key", "value"):
      yield from family.linear(f"{attention}.self.{name}", f"{module}/{name}")
    yield Row(
      f"{attention}.self.relative_position_bias_table",
      (f"params/{module}/attention/relative_bias",),
    )
    yield from family.linear(f"{attention}.output.dense", f"{module}/out")
    yield from block_rows(theirs, ours)
  for number in range(1, len(config.depths)):
    merging = f"swin.encoder.layers.{number - 1}.downsample"
    yield from family.norm(f"{merging}.norm", f"patches_{number}/norm")
    yield from family.linear(
      f"{merging}.reduction", f"patches_{number}/reduction"
    )
  yield from family.norm("swin.layernorm", "encoder_norm")
  yield from family.linear("classifier", "classes")


def _buffers(config: PyramidConfig) -> dict[str, np.ndarray]:
  """Returns the relative-position index of each pair of positions in a window."""
  return {
    f"{theirs}.attention.self.relative_position_index": _index(window)
    for (theirs, _), mechanism in zip(
      blocks(config, _BLOCK), config.layers("encoder_attention"), strict=True
    )
    if (window := mechanism.options.get("window"))
  }


def _index(window: int) -> np.ndarray:
  y, x = np.divmod(np.arange(window * window), window)
  dy, dx = (axis[:, None] - axis + window - 1 for axis in (y, x))
  return dy * (2 * window - 1) + dx


def to_json(description: Description) -> dict[str, Any]:
  """Implements `Family.to_json`.

  Raises:
    ValueError: Swin does not support these stages or images.
  """
  config = description.config
  height, width, channels = config.image_shape
  ratios = {
    mlp_width / features
    for mlp_width, features in zip(
      config.mlp_features, config.features, strict=True
    )
  }
  windows = {
    layer.options.get("window", 7)
    for layer in config.layers("encoder_attention")
    if layer.name == "window_2d"
  }
  for field, condition, expected in (
    ("image_shape", height == width, "square images"),
    ("mlp_features", len(ratios) == 1, "one multiple of features"),
    ("patch_size", config.merges, "only that of the first stage"),
    ("encoder_attention", len(windows) < 2, "windows of one size"),
  ):
    if not condition:
      raise ValueError(
        f"{field}: swin has {expected}, got {getattr(config, field)}"
      )
  return {
    "model_type": "swin",
    "image_size": height,
    "num_channels": channels,
    "patch_size": config.patch_size[0],
    "embed_dim": config.features[0],
    "depths": list(config.depths),
    "num_heads": list(config.num_heads),
    "window_size": min(windows, default=1),
    "mlp_ratio": ratios.pop(),
    "hidden_act": family.their_activation(config.activation),
    "hidden_dropout_prob": config.dropout_rate,
    "layer_norm_eps": config.norm_epsilon,
    "id2label": {str(i): f"LABEL_{i}" for i in range(description.outputs)},
  }


SWIN = Family(
  name="swin",
  architectures={"SwinForImageClassification": "class"},
  describe=describe,
  rows=_rows,
  buffers=_buffers,
  to_json=to_json,
  without_effect={
    **no_effect("affects only training", "drop_path_rate"),
    **no_effect(
      "belongs to another head",
      "encoder_stride hidden_size out_features out_indices stage_names",
    ),
    **no_effect("is not read by any version of transformers", "path_norm"),
  },
  inputs=PIXELS,
  config_type=PyramidConfig,
)
"""Encoders in stages, with shifted windows and merged neighbours."""
