"""An image encoder in stages, in which tokens become fewer and wider."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from attention import Attention, Dims
from models.block import Block
from models.kind import Sizes
from models.mechanism_variables import variable_shapes
from models.multi_head_attention import apply_mechanism
from models.published.family import Description
from projects.vision.grid_convolution import ConvolutionalBlock
from projects.vision.maps import ImageModel
from projects.vision.patches import image_shape
from projects.vision.pyramid_config import PyramidConfig


class PatchConvolution(nn.Module):
  """Embeds patches of a grid by one convolution and a norm.

  Attributes:
    config: config of the model.
    number: number of the stage.

  Papers: Swin transformer, section 3.1, arXiv:2103.14030; CvT, section 3.1,
  arXiv:2103.15808.
  """

  config: PyramidConfig
  number: int

  @nn.compact
  def __call__(
    self, grid: Float[Array, "B H W C"], rows: int, columns: int
  ) -> Float[Array, "B R S F"]:
    """Returns the coarser grid, with `rows` and `columns`."""
    stage = self.config.stage(self.number)
    size, stride, padding = self.config.patches(self.number)
    # Zeros at the bottom and right complete the last patches.
    ends = [
      max((count - 1) * stride + size - side - padding, 0)
      for count, side in zip((rows, columns), grid.shape[1:3], strict=True)
    ]
    patches = nn.Conv(
      stage.features,
      (size, size),
      strides=(stride, stride),
      padding=[(padding, end) for end in ends],
      dtype=stage.dtype,
      param_dtype=stage.param_dtype,
      name="projection",
    )(grid)
    return stage.make_norm(name="norm")(patches[:, :rows, :columns])


class PatchMerging(nn.Module):
  """norm([x₀₀; x₁₀; x₀₁; x₁₁]) · W: merges 2 × 2 neighbours into one token.

  Indices of neighbours are (row, column); a grid with an odd side is padded with zeros.
  W is `[4F, 2F]`, without a bias.

  Attributes:
    config: config of the model.
    number: number of the stage after it.

  Paper: Swin transformer, section 3.1, arXiv:2103.14030.
  """

  config: PyramidConfig
  number: int

  @nn.compact
  def __call__(
    self, grid: Float[Array, "B H W F"], rows: int, columns: int
  ) -> Float[Array, "B R S G"]:
    """Returns the coarser grid, with `rows` and `columns`."""
    stage = self.config.stage(self.number)
    height, width = grid.shape[1:3]
    grid = jnp.pad(
      grid,
      [(0, 0), (0, 2 * rows - height), (0, 2 * columns - width), (0, 0)],
    )
    order = ((0, 0), (1, 0), (0, 1), (1, 1))
    parts = [grid[:, row::2, column::2] for row, column in order]
    x = stage.make_norm(name="norm")(jnp.concatenate(parts, axis=-1))
    return nn.Dense(
      stage.features,
      use_bias=False,
      dtype=stage.dtype,
      param_dtype=stage.param_dtype,
      name="reduction",
    )(x)


class Pyramid(ImageModel, nn.Module):
  """Maps images to logits of classes.

  Attributes:
    config: config of the model.
    target_vocab_size: V, the number of classes.
    image_shape: height, width and channels of the images.
    attend: calls the mechanism of an attention module.
  """

  state: ClassVar[tuple[str, ...]] = ("batch_stats",)

  config: PyramidConfig
  target_vocab_size: int
  image_shape: tuple[int, int, int]
  attend: Callable[..., Array] = apply_mechanism

  @nn.nowrap
  def as_published(self, variables):
    """Returns the model's description and variables in a published family."""
    config = dataclasses.replace(self.config, image_shape=self.image_shape)
    shapes = {"image": self.image_shape}
    description = Description(config, 0, self.target_vocab_size, 0, shapes)
    return description, variables

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "B H W C"],
    *,
    deterministic: bool = True,
    axis_name: str | None = None,
  ) -> Float[Array, "B 1 V"]:
    """Computes the logits of the class of each image.

    Args:
      images: `[B, H, W, C]`; the size may differ from `image_shape` if no mechanism has
        variables per position.
      deterministic: whether dropout is off and batch norm uses running statistics;
        otherwise the rng 'dropout' is needed if there is dropout.
      axis_name: axis of a `pmap` whose devices share the rows of one batch.

    Returns:
      `[B, 1, V]` float32, or float64 with dtype 'float64'.

    Raises:
      ValueError: the images have another number of channels, or are too small.
    """
    config, channels = self.config, self.image_shape[2]
    if images.ndim != 4 or images.shape[3] != channels:
      raise ValueError(
        f"image: expected [B, H, W, {channels}], got {list(images.shape)}"
      )
    dropout = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    grid = images.astype(config.dtype)
    x, layers = grid, itertools.count()
    for number, (rows, columns) in enumerate(config.grids(*images.shape[1:3])):
      stage = config.stage(number)
      patches = PatchMerging if number and config.merges else PatchConvolution
      patches = patches(config, number, name=f"patches_{number}")
      grid = dropout(patches(grid, rows, columns))
      x = grid.reshape(len(grid), rows * columns, stage.features)
      tokens = config.tokens(number, (rows, columns))
      if tokens > rows * columns:
        x = self._with_class_token(x)
      call: dict[str, Any] = {}
      if config.convolution:
        call = {"grid": (rows, columns), "axis_name": axis_name}
      for layer in range(config.depths[number]):
        mechanism = config.mechanism(number, layer, (rows, columns))
        name = f"encoder_{next(layers)}"
        if config.convolution is None:
          block = Block(stage, mechanism, tokens, attend=self.attend, name=name)
        else:
          block = ConvolutionalBlock(
            stage,
            mechanism,
            tokens,
            convolution=config.convolution,
            attend=self.attend,
            name=name,
          )
        x = block(
          x,
          positions=np.arange(tokens)[None, :],
          deterministic=deterministic,
          **call,
        )
      grid = x[:, tokens - rows * columns :].reshape(grid.shape)
    if config.class_token:
      x = x[:, :1]
    last = config.stage(len(config.depths) - 1)
    norm = last.make_norm(name="encoder_norm")
    x = norm(x).mean(axis=1, keepdims=True)
    logits = nn.Dense(
      self.target_vocab_size,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      name="classes",
    )(x)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

  def _with_class_token(
    self, x: Float[Array, "B T F"]
  ) -> Float[Array, "B T+1 F"]:
    """Puts [CLS] before the tokens of the grid."""
    normal = nn.initializers.normal(0.02)
    shape = (x.shape[2],)
    token = self.param("class_token", normal, shape, self.config.param_dtype)
    token = jnp.broadcast_to(token.astype(x.dtype), (len(x), 1, *shape))
    return jnp.concatenate([token, x], axis=1)


def create(config: PyramidConfig, sizes: Sizes) -> Pyramid:
  """Creates the model for a task's sizes, without computing anything.

  Raises:
    ValueError: the task has no images, the patches do not fit into them, or a
      mechanism does not support the size of a stage.
  """
  shape = image_shape(config, sizes)
  for number, grid in enumerate(config.grids(*shape[:2])):
    stage = config.stage(number)
    dims = Dims(
      stage.num_heads,
      stage.kv_heads,
      stage.query_dim,
      config.tokens(number, grid),
      stage.features,
    )
    for layer in range(config.depths[number]):
      try:
        _check_length(config.mechanism(number, layer, grid).build(), dims)
      except ValueError as error:
        raise ValueError(f"encoder_attention: {error}") from error
  return Pyramid(config, sizes.target_vocab_size, shape)


def _check_length(mechanism: Attention, dims: Dims) -> None:
  """Raises ValueError if a mechanism does not support the number of tokens."""
  variables = variable_shapes(mechanism, dims)
  shape = (1, dims.max_length, dims.num_heads, dims.head_dim)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  inputs = jax.ShapeDtypeStruct((*shape[:2], dims.features), jnp.float32)
  has_key = not {"shared_qk", "own_keys"} & mechanism.supports

  def attend(variables, x, inputs):
    gates = {}
    if mechanism.gates is not None:
      gates = mechanism.gates(variables, inputs)
    return mechanism.apply(variables, x, x if has_key else None, x, **gates)

  jax.eval_shape(attend, variables, x, inputs)
