"""The config of an image encoder in stages, which validates itself."""

import inspect
import math
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from pydantic import Field

from attention import mechanism as mechanisms
from models.attention_config import (
  NEEDS,
  AttentionConfig,
  AttentionFields,
  Layers,
)
from models.attention_module_config import SlotConfig
from models.config import Activation, Dtype, ModelConfig
from settings.fields import Count, Rate, Whole, check, checked


@checked
class PyramidConfig(AttentionFields):
  """An encoder whose tokens become fewer and wider from stage to stage.

  With one `patch_size`, only the first stage embeds patches, and each later stage
  merges 2 × 2 neighbours of the previous stage (Swin). With one `patch_size` per stage,
  each stage embeds patches of the previous stage by a convolution (CvT). Layers are
  pre-norm, without position encodings.

  Attributes:
    kind: 'pyramid'.
    depths: number of layers of each stage.
    num_heads: N of each stage.
    features: F of each stage.
    mlp_features: hidden width of the feed-forward layers of each stage.
    patch_size: side of the patches, of the first stage or of each stage.
    patch_stride: stride of the patches; None means `patch_size`, with zeros that
      complete the last patches.
    patch_padding: number of zeros at each edge of the input of patches; None means 0.
    activation: activation of the feed-forward layers, as in `ModelConfig`.
    attention_bias: whether the projections of attention modules have biases.
    scale_by_features: whether attention logits are divided by √F instead of √H (CvT).
    convolution: side of the depthwise convolutions with batch norm before query, key
      and value (CvT); None means no convolutions.
    class_token: whether the last stage has a token [CLS] for the class (CvT);
      otherwise the mean of all tokens is used (Swin).
    norm_epsilon: number that a norm adds to the variance.
    dropout_rate: rate of dropout of sub-layer outputs and of patches.
    attention_dropout_rate: rate of dropout of attention weights.
    image_shape: height, width and channels of the images, if they differ from those
      of the task.
    dtype: dtype of activations; logits and softmax are float32, or float64 with dtype
      'float64'.
    param_dtype: dtype of parameters.
    encoder_attention: mechanism of all layers, or several that the layers of a stage
      take in turn; None is dense. A mechanism with an option `grid` gets the grid of
      its stage.

  Papers: Swin transformer, arXiv:2103.14030; CvT, arXiv:2103.15808.
  """

  module: ClassVar[str] = "projects.vision.pyramid:create"

  kind: Literal["pyramid"] = "pyramid"
  depths: Annotated[tuple[Count, ...], Field(min_length=1)]
  num_heads: tuple[Count, ...]
  features: tuple[Count, ...]
  mlp_features: tuple[Count, ...]
  patch_size: tuple[Count, ...]
  patch_stride: tuple[Count, ...] | None = None
  patch_padding: tuple[Whole, ...] | None = None
  activation: Activation = "gelu"
  attention_bias: bool = True
  scale_by_features: bool = False
  convolution: Count | None = None
  class_token: bool = False
  norm_epsilon: Annotated[float, Ge(0)] = 1e-5
  dropout_rate: Rate = 0.0
  attention_dropout_rate: Rate = 0.0
  image_shape: tuple[int, int, int] | None = None
  dtype: Dtype = "float32"
  param_dtype: Dtype = "float32"
  encoder_attention: Layers | None = None

  def __post_init__(self):
    self._check_lists()
    check(
      self,
      "convolution",
      self.convolution is None or self.convolution % 2 == 1,
      "an odd side, or None",
    )
    for features, heads in zip(self.features, self.num_heads, strict=True):
      if features % heads:
        raise ValueError(
          f"features: {features} is not divisible by the {heads} heads "
          "(num_heads) of its stage"
        )
    needs = {"bidirectional": NEEDS["encoder_attention"]["bidirectional"]}
    if self.attention_dropout_rate:
      needs["dropout"] = "drop attention weights (attention_dropout_rate)"
    self.fill_attention_fields({"encoder_attention": needs})

  @property
  def layout(self) -> str:
    """The batch layout of an encoder."""
    return "encoder"

  @property
  def head(self) -> str:
    """'class': logits of classes."""
    return "class"

  @property
  def num_layers(self) -> int:
    """The number of layers of all stages."""
    return sum(self.depths)

  @property
  def merges(self) -> bool:
    """Whether stages merge neighbours instead of embedding patches."""
    return len(self.patch_size) == 1 < len(self.depths)

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of each layer, stage by stage."""
    mechanisms = self.attentions[field]
    return tuple(
      mechanisms[i % len(mechanisms)]
      for depth in self.depths
      for i in range(depth)
    )

  def stage(self, number: int) -> ModelConfig:
    """The config of the layers of a stage, as an encoder of its width.

    `num_layers` is that of all stages, because initial values depend on it.
    """
    features = self.features[number]
    return ModelConfig(
      kind="encoder",
      num_layers=self.num_layers,
      num_heads=self.num_heads[number],
      features=features,
      mlp_features=self.mlp_features[number],
      activation=self.activation,
      slot=SlotConfig(
        attention_bias=self.attention_bias,
        attention_scale=features**-0.5 if self.scale_by_features else None,
      ),
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
      position="none",
      norm_epsilon=self.norm_epsilon,
      head="class",
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      encoder_attention=self.attentions["encoder_attention"],
    )

  def grids(self, height: int, width: int) -> list[tuple[int, int]]:
    """Returns the rows and columns of tokens in each stage, for an image size.

    Raises:
      ValueError: the images are too small for the patches.
    """
    rows, columns = height, width
    grids = []
    for number in range(len(self.depths)):
      if number and self.merges:
        rows, columns = -(-rows // 2), -(-columns // 2)
      else:
        size, stride, padding = self.patches(number)
        rows, columns = (
          # Swin pads the image with zeros to whole patches; CvT does not.
          -(-side // stride)
          if self.patch_stride is None and not padding
          else (side + 2 * padding - size) // stride + 1
          for side in (rows, columns)
        )
      if min(rows, columns) < 1:
        raise ValueError(
          f"patch_size: expected patches that fit into images of {height} × "
          f"{width}; stage {number + 1} has no tokens"
        )
      grids.append((rows, columns))
    return grids

  def patches(self, number: int) -> tuple[int, int, int]:
    """Returns the side, stride and padding of the patches of a stage."""
    size = self.patch_size[number]
    stride = self.patch_stride[number] if self.patch_stride else size
    return size, stride, self.patch_padding[number] if self.patch_padding else 0

  def mechanism(self, number: int, layer: int, grid: Any) -> AttentionConfig:
    """The mechanism of a layer of a stage, with the grid if it has that option."""
    configs = self.attentions["encoder_attention"]
    config = configs[layer % len(configs)]
    factory = mechanisms.find(config.name)
    has_grid = "grid" in inspect.signature(factory).parameters
    if not has_grid or config.options.get("grid") is not None:
      return config
    return AttentionConfig(config.name, {**config.options, "grid": grid})

  def tokens(self, number: int, grid: tuple[int, int]) -> int:
    """T of a stage."""
    is_last = number == len(self.depths) - 1
    return math.prod(grid) + int(self.class_token and is_last)

  def _check_lists(self):
    stages = len(self.depths)
    for field, lengths in (
      ("depths", {stages}),
      ("num_heads", {stages}),
      ("features", {stages}),
      ("mlp_features", {stages}),
      ("patch_size", {1, stages}),
      ("patch_stride", {len(self.patch_size)}),
      ("patch_padding", {len(self.patch_size)}),
    ):
      values = getattr(self, field)
      if values is None:
        continue
      if len(values) not in lengths:
        expected = " or ".join(map(str, sorted(lengths)))
        noun = "number" if expected == "1" else "numbers"
        raise ValueError(
          f"{field}: expected {expected} {noun}, as depths has {stages}"
          f"{' and patch_size ' + str(len(self.patch_size)) if 'patch_' in field else ''}"
          f", got {list(values)}"
        )
    if self.merges:
      for narrow, wide in zip(self.features, self.features[1:], strict=False):
        if wide != 2 * narrow:
          raise ValueError(
            f"features: merging doubles them from stage to stage; expected "
            f"{2 * narrow} after {narrow}, got {wide}"
          )
