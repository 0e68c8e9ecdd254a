"""ViT: Dosovitskiy et al., arXiv:2010.11929; DeiT: Touvron et al., arXiv:2012.12877."""

from collections.abc import Collection, Mapping
import functools
from typing import Any

import numpy as np

from models import nested
from models.published import family
from models.published.bert import num_labels, sizes_json
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect
from projects.vision.vit_config import VitConfig

KERNEL = Layout(
  lambda x, n: [np.transpose(x, (2, 3, 1, 0))],
  lambda xs: np.transpose(xs[0], (3, 2, 0, 1)),
)
"""PyTorch's convolution is `[out, in, height, width]`."""

_TABLE = Layout(lambda x, n: [x[0]], lambda xs: xs[0][None])
"""`[1, T, F]`."""

TOKEN = Layout(lambda x, n: [x[0, 0]], lambda xs: xs[0][None, None])
"""`[1, 1, F]`."""


def patch_rows(theirs: str, ours: str) -> list[Row]:
  """The rows of the convolution that embeds patches."""
  return [
    Row(f"{theirs}.weight", (f"params/{ours}/projection/kernel",), KERNEL),
    Row(f"{theirs}.bias", (f"params/{ours}/projection/bias",)),
  ]


PIXELS = {"pixel_values": "image"}
"""Names of the inputs of image models."""


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  family.only(hf_config, qkv_bias=True)
  size = family.size(hf_config, "image_size", 224)
  shape = (size, size, family.size(hf_config, "num_channels", 3))
  config = nested.make(
    VitConfig,
    num_layers=family.size(hf_config, "num_hidden_layers", 12),
    num_heads=family.size(hf_config, "num_attention_heads", 12),
    features=family.size(hf_config, "hidden_size", 768),
    mlp_features=family.size(hf_config, "intermediate_size", 3072),
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    attention_bias=True,
    dropout_rate=family.number(hf_config, "hidden_dropout_prob", 0.0),
    position="learned",
    norm="pre",
    norm_epsilon=family.number(hf_config, "layer_norm_eps", 1e-12),
    patch_size=family.size(hf_config, "patch_size", 16),
    distillation=hf_config.get("model_type") == "deit",
    head=head,
    head_bias=True,
    image_shape=shape,
  )
  labels = num_labels(hf_config)
  return Description(
    config, 0, labels, config.num_tokens(shape), {"image": shape}
  )


def to_json(name: str, description: Description) -> dict[str, Any]:
  """Implements `Family.to_json` for the family with this name."""
  config = description.config
  height, width, channels = config.image_shape or (0, 0, 0)
  if height != width:
    raise ValueError(
      f"image_shape: expected square images, got {height} × {width}"
    )
  return {
    "model_type": name,
    "image_size": height,
    "num_channels": channels,
    "patch_size": config.patch_size,
    **sizes_json(config),
    "id2label": {str(i): f"LABEL_{i}" for i in range(description.outputs)},
  }


def _rows(prefix: str) -> list[Row]:
  patches, layer = f"{prefix}.embeddings", f"{prefix}.encoder.layer.{{i}}"
  attention, module = f"{layer}.attention", "encoder_{i}/self_attention"
  ours = "params/patches"
  return [
    Row(f"{patches}.cls_token", (f"{ours}/class_token",), TOKEN),
    Row(
      f"{patches}.distillation_token", (f"{ours}/distillation_token",), TOKEN
    ),
    Row(f"{patches}.position_embeddings", (f"{ours}/positions",), _TABLE),
    *patch_rows(f"{patches}.patch_embeddings.projection", "patches"),
    *family.linear(f"{attention}.attention.query", f"{module}/query"),
    *family.linear(f"{attention}.attention.key", f"{module}/key"),
    *family.linear(f"{attention}.attention.value", f"{module}/value"),
    *family.linear(f"{attention}.output.dense", f"{module}/out"),
    *family.norm(f"{layer}.layernorm_before", f"{module}_norm"),
    *family.norm(f"{layer}.layernorm_after", "encoder_{i}/mlp_norm"),
    *family.linear(f"{layer}.intermediate.dense", "encoder_{i}/mlp/hidden"),
    *family.linear(f"{layer}.output.dense", "encoder_{i}/mlp/out"),
    *family.norm(f"{prefix}.layernorm", "encoder_norm"),
  ]


_WITHOUT_EFFECT = no_effect(
  "belongs to another head", "encoder_stride pooler_act pooler_output_size"
)

VIT = Family(
  name="vit",
  architectures={"ViTForImageClassification": "class"},
  describe=describe,
  rows=lambda config: (
    *_rows("vit"),
    *family.linear("classifier", "head/classes"),
  ),
  to_json=functools.partial(to_json, "vit"),
  without_effect=_WITHOUT_EFFECT,
  inputs=PIXELS,
  config_type=VitConfig,
)
"""Pre-norm encoders over patches, with [CLS] and learned positions."""

DEIT = Family(
  name="deit",
  architectures={"DeiTForImageClassificationWithTeacher": "class"},
  describe=describe,
  rows=lambda config: (
    *_rows("deit"),
    *family.linear("cls_classifier", "head/classes"),
    *family.linear("distillation_classifier", "head/distilled"),
  ),
  to_json=functools.partial(to_json, "deit"),
  without_effect=_WITHOUT_EFFECT,
  inputs=PIXELS,
  config_type=VitConfig,
)
"""ViT with a distillation token, whose logits are the mean of two heads."""
