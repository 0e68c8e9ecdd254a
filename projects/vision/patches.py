"""Converts images to sequences: special tokens, then one token per patch."""

import math
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from models.kind import Sizes
from projects.vision.vit_config import VitConfig
from tasks.pixels import check_images


class Patches(nn.Module):
  """x = [cls; (distillation;) patches of the image · W + b] + positions.

  Patches are p × p, in row-major order; positions are learned for the grid of
  `image_shape`, and interpolated bicubically for other grids.

  Attributes:
    config: config of the model.
    image_shape: (height, width, channels) for which positions are learned.

  Paper: An image is worth 16x16 words, section 3.1, arXiv:2010.11929; DeiT,
  section 4, arXiv:2012.12877, for the distillation token.
  """

  config: VitConfig
  image_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B T F"]:
    """Returns `[B, 1 + patches, F]`, or one token more with `distillation`.

    Raises:
      ValueError: the images have another number of channels, or are smaller than a
        patch.
    """
    config = self.config
    size = config.patch_size
    check_images(images.shape, size, self.image_shape[2])
    images = images.astype(config.dtype)
    patches = nn.Conv(
      config.features,
      (size, size),
      strides=(size, size),
      padding="VALID",
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      name="projection",
    )(images)
    grid = (patches.shape[1], patches.shape[2])
    x = patches.reshape(patches.shape[0], -1, config.features)
    normal = nn.initializers.normal(0.02)
    names = ["class_token", "distillation_token"][: 1 + config.distillation]
    for name in reversed(names):
      token = self.param(name, normal, (config.features,), config.param_dtype)
      token = jnp.broadcast_to(token.astype(x.dtype), (len(x), 1, *token.shape))
      x = jnp.concatenate([token, x], axis=1)
    num_special = len(names)
    if config.position == "learned":
      table_grid = config.grid(self.image_shape)
      shape = (num_special + math.prod(table_grid), config.features)
      table = self.param("positions", normal, shape, config.param_dtype)
      if grid != table_grid:
        positions = table[num_special:].reshape(*table_grid, -1)
        positions = resize_bicubic(positions, grid).reshape(math.prod(grid), -1)
        table = jnp.concatenate([table[:num_special], positions])
      x = x + table.astype(x.dtype)[None]
    return x


def image_shape(config: Any, sizes: Sizes) -> tuple[int, int, int]:
  """Returns the height, width and channels of the images of a model.

  Raises:
    ValueError: the task has no images, or they have another number of channels.
  """
  shape = sizes.input_shapes.get("image")
  if shape is None:
    raise ValueError(
      f"kind: '{config.kind}' reads images; expected a task with images"
    )
  model_shape = config.image_shape or shape
  if model_shape[2] != shape[2]:
    raise ValueError(
      f"image_shape: expected the {shape[2]} channels of the task, got "
      f"{model_shape[2]}"
    )
  return model_shape


def resize_bicubic(
  table: Float[Array, "H W F"], grid: tuple[int, int]
) -> Float[Array, "R C F"]:
  """Resamples a table from one grid to another, with half-pixel centers.

  Uses Keys' cubic kernel with a = −0.75, repeated edges, and no antialiasing, like
  PyTorch's `interpolate(mode='bicubic')`. (`jax.image.resize` has a = −0.5.)

  Args:
    table: `[H, W, F]`.
    grid: rows and columns of the result.

  Paper: Keys 1981, Cubic convolution interpolation for digital image processing.
  """
  rows, columns = (
    jnp.asarray(_cubic_weights(*sizes), table.dtype)
    for sizes in zip(table.shape[:2], grid, strict=True)
  )
  return jnp.einsum("RH,CW,HWF->RCF", rows, columns, table)


def _cubic_weights(size: int, new_size: int) -> np.ndarray:
  """Returns `[new_size, size]`, the weight of each old position in each new one."""
  a = -0.75
  centre = (np.arange(new_size) + 0.5) * size / new_size - 0.5
  first = np.floor(centre).astype(int)
  weights = np.zeros((new_size, size))
  for offset in range(-1, 3):
    x = np.abs(centre - (first + offset))
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    source = np.clip(first + offset, 0, size - 1)
    values = np.where(x <= 1, near, far)
    np.add.at(weights, (np.arange(new_size), source), values)
  return weights
