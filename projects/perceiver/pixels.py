"""Images as sequences of pixels, with positions as Fourier features."""

import math

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from projects.perceiver.config import PerceiverConfig
from tasks.pixels import check_images


class Pixels(nn.Module):
  """x = [pixel; Fourier features of its position] · W + b, in row-major order.

  Attributes:
    config: config of the model.
    image_shape: (height, width, channels) of the task's images.

  Paper: Perceiver, section 3.2, arXiv:2103.03206.
  """

  config: PerceiverConfig
  image_shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B S F"]:
    """Computes inputs `[B, H · W, F]` for images of any height and width.

    Raises:
      ValueError: the images have another number of channels.
    """
    config = self.config
    check_images(images.shape, 1, self.image_shape[2])
    batch, height, width, channels = images.shape
    positions = fourier_features((height, width), config.fourier_bands or 0)
    positions = jnp.asarray(positions, config.dtype)[None]
    pixels = images.reshape(batch, -1, channels).astype(config.dtype)
    positions = jnp.broadcast_to(positions, (batch, *positions.shape[1:]))
    return nn.Dense(
      config.input_features,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      name="projection",
    )(jnp.concatenate([pixels, positions], axis=-1))


def fourier_features(shape: tuple[int, ...], num_bands: int) -> np.ndarray:
  """Computes Fourier features of the position of each element of a grid.

      [x, sin(π f_1 x), …, sin(π f_K x), cos(π f_1 x), …, cos(π f_K x)]

  for each axis. x goes from −1 to 1, and the K frequencies f are equally spaced from 1
  to half the size of the axis, the Nyquist frequency.

  Args:
    shape: shape of the grid.
    num_bands: K.

  Returns:
    `[elements, axes · (1 + 2 K)]` float64, in row-major order of the grid.

  Paper: Perceiver, section 3.2, arXiv:2103.03206.
  """
  axes = []
  for size in shape:
    x = np.linspace(-1.0, 1.0, size)[:, None]
    waves = np.pi * np.linspace(1.0, size / 2, num_bands)[None] * x
    axes.append(np.hstack([x, np.sin(waves), np.cos(waves)]))
  grid = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
  positions = [axis[i.reshape(-1)] for axis, i in zip(axes, grid, strict=True)]
  return np.hstack(positions).reshape(math.prod(shape), -1)
