"""CvT: Wu et al., arXiv:2103.15808."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.attention_config import AttentionConfig
from models.published import family
from models.published.bert import num_labels
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from projects.vision.pyramid_config import PyramidConfig
from projects.vision.swin_family import block_rows, blocks
from projects.vision.vit_family import PIXELS, TOKEN, patch_rows

_BLOCK = "cvt.encoder.stages.{stage}.layers.{layer}"

DEPTHWISE = Layout(
  lambda x, n: [np.moveaxis(x[:, 0], 0, -1)],
  lambda xs: np.moveaxis(xs[0], -1, 0)[:, None],
)
"""PyTorch's depthwise convolution is `[F, 1, …]`, ours is `[…, F]`."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names, head
  depths = family.sizes(hf_config, "depth", [1, 2, 10])
  stages = len(depths)
  only_last = [False] * (stages - 1) + [True]
  has_class = family.value(hf_config, "cls_token", list[bool], only_last)
  if len(has_class) != stages or any(has_class[:-1]):
    raise ValueError(
      f"cls_token: expected true only in the last stage, got {has_class}"
    )
  for name, expected in (
    ("qkv_bias", True),
    ("qkv_projection_method", "dw_bn"),
    ("stride_q", 1),
  ):
    family.only(hf_config, **{name: [expected] * stages})
  [kernel] = _shared_value(hf_config, "kernel_qkv", list[int], [3] * stages)
  [stride] = _shared_value(hf_config, "stride_kv", list[int], [2] * stages)
  for name in ("padding_q", "padding_kv"):
    [padding] = _shared_value(hf_config, name, list[int], [1] * stages)
    if padding != kernel // 2:
      raise ValueError(
        f"{name}: expected {kernel // 2}, half of kernel_qkv, got {padding}"
      )
  features = family.sizes(hf_config, "embed_dim", [64, 192, 384])
  ratios = family.value(hf_config, "mlp_ratio", list[float], [4.0] * stages)
  if len(ratios) != len(features):
    raise ValueError(
      f"mlp_ratio: expected {len(features)} numbers, got {ratios}"
    )
  [dropout] = _shared_value(hf_config, "drop_rate", list[float], [0.0] * stages)
  # Published models accept images of any size, and files do not have that of training.
  side = family.size(hf_config, "image_size", 224)
  config = PyramidConfig(
    depths=depths,
    num_heads=family.sizes(hf_config, "num_heads", [1, 3, 6]),
    features=features,
    mlp_features=tuple(
      int(width * ratio) for width, ratio in zip(features, ratios, strict=True)
    ),
    patch_size=family.sizes(hf_config, "patch_sizes", [7, 3, 3]),
    patch_stride=family.sizes(hf_config, "patch_stride", [4, 2, 2]),
    patch_padding=family.sizes(hf_config, "patch_padding", [2, 1, 1], least=0),
    scale_by_features=True,
    convolution=kernel,
    class_token=bool(has_class[-1]),
    dropout_rate=dropout,
    image_shape=(side, side, family.size(hf_config, "num_channels", 3)),
    encoder_attention=AttentionConfig("strided_2d", {"stride": stride}),
  )
  shape = config.image_shape
  return Description(config, 0, num_labels(hf_config), 0, {"image": shape})


def _shared_value(
  hf_config: Mapping[str, Any], name: str, kind: Any, default: Sequence[Any]
) -> set[Any]:
  """Returns a set of the one value that all stages share.

  Raises:
    ValueError: the stages have different values.
  """
  values = family.value(hf_config, name, kind, default)
  if len(values) != len(default) or len(set(values)) != 1:
    raise ValueError(f"{name}: expected the same in every stage, got {values}")
  return set(values)


def _rows(config: PyramidConfig) -> Iterator[Row]:
  for stage in range(len(config.depths)):
    theirs = f"cvt.encoder.stages.{stage}.embedding.convolution_embeddings"
    ours = f"patches_{stage}"
    yield from patch_rows(f"{theirs}.projection", ours)
    yield from family.norm(f"{theirs}.normalization", f"{ours}/norm")
  last = f"cvt.encoder.stages.{len(config.depths) - 1}"
  yield Row(f"{last}.cls_token", ("params/class_token",), TOKEN)
  for theirs, ours in blocks(config, _BLOCK):
    attention = f"{theirs}.attention.attention"
    module = f"{ours}/self_attention"
    for name in ("query", "key", "value"):
      convolution = f"{attention}.convolution_projection_{name}"
      convolution = f"{convolution}.convolution_projection"
      path = f"{module}/{name}_convolution"
      yield Row(
        f"{convolution}.convolution.weight",
        (f"params/{path}/convolution/kernel",),
        DEPTHWISE,
      )
      yield from family.batch_norm(
        f"{convolution}.normalization", f"{path}/norm"
      )
      yield from family.linear(
        f"{attention}.projection_{name}", f"{module}/{name}"
      )
    yield from family.linear(
      f"{theirs}.attention.output.dense", f"{module}/out"
    )
    yield from block_rows(theirs, ours)
  yield from family.norm("layernorm", "encoder_norm")
  yield from family.linear("classifier", "classes")


def _buffers(config: PyramidConfig) -> dict[str, np.ndarray]:
  """Returns PyTorch's batch counters of batch norms."""
  return {
    f"{theirs}.attention.attention.convolution_projection_{name}"
    ".convolution_projection.normalization.num_batches_tracked": np.zeros(
      (), np.int64
    )
    for theirs, _ in blocks(config, _BLOCK)
    for name in ("query", "key", "value")
  }


def to_json(description: Description) -> dict[str, Any]:
  """Implements `Family.to_json`.

  Raises:
    ValueError: CvT does not support these stages.
  """
  config = description.config
  stages = len(config.depths)
  strides = {
    layer.options.get("stride", 2)
    for layer in config.layers("encoder_attention")
    if layer.name == "strided_2d"
  }
  for field, condition, expected in (
    ("image_shape", len({*config.image_shape[:2]}) == 1, "square images"),
    ("patch_size", not config.merges, "patches in every stage"),
    ("convolution", config.convolution, "convolutions"),
    ("encoder_attention", len(strides) < 2, "one stride"),
    ("activation", config.activation == "gelu", "'gelu'"),
  ):
    if not condition:
      raise ValueError(
        f"{field}: cvt has {expected}, got {getattr(config, field)}"
      )
  patches = [config.patches(stage) for stage in range(stages)]
  size, stride, padding = (list(x) for x in zip(*patches, strict=True))
  kernel = config.convolution or 0
  return {
    "model_type": "cvt",
    "image_size": config.image_shape[0],
    "num_channels": config.image_shape[2],
    "depth": list(config.depths),
    "num_heads": list(config.num_heads),
    "embed_dim": list(config.features),
    "mlp_ratio": [
      mlp_width / features
      for mlp_width, features in zip(
        config.mlp_features, config.features, strict=True
      )
    ],
    "patch_sizes": size,
    "patch_stride": stride,
    "patch_padding": padding,
    "cls_token": [False] * (stages - 1) + [config.class_token],
    "kernel_qkv": [kernel] * stages,
    "padding_q": [kernel // 2] * stages,
    "padding_kv": [kernel // 2] * stages,
    "stride_q": [1] * stages,
    "stride_kv": [min(strides, default=1)] * stages,
    "qkv_bias": [True] * stages,
    "qkv_projection_method": ["dw_bn"] * stages,
    "drop_rate": [config.dropout_rate] * stages,
    "attention_drop_rate": [0.0] * stages,
    "drop_path_rate": [0.0] * stages,
    "id2label": {str(i): f"LABEL_{i}" for i in range(description.outputs)},
  }


CVT = Family(
  name="cvt",
  architectures={"CvtForImageClassification": "class"},
  describe=describe,
  rows=_rows,
  buffers=_buffers,
  to_json=to_json,
  without_effect={
    **no_effect(
      "affects only training", "attention_drop_rate drop_path_rate drop_rate"
    ),
    **no_effect("is not read: every norm uses 1e-5", "layer_norm_eps"),
  },
  inputs=PIXELS,
  config_type=PyramidConfig,
)
"""Encoders in stages, with convolutions before query, key and value."""
