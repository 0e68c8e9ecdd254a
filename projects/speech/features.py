"""The front ends of a Conformer, for log-mel frames or for samples."""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.config import ACTIVATIONS
from projects.speech.config import ConformerConfig, ExtractorConfig
from projects.speech.mel import REDUCTION

_KERNEL_SIZE = 3
_CONVOLUTIONS = 2


def num_positions(num_frames: int) -> int:
  """Returns T for a number of frames: one position for every fourth frame."""
  return -(-num_frames // REDUCTION)


class Subsampling(nn.Module):
  """Two convolutions along time, each over three frames with stride 2.

    y_j = relu(W · [x_{2j−1}; x_{2j}; x_{2j+1}] + b)

  Padding is treated as zeros. The convolutions extend over all bands, so each is a
  matrix product with concatenated frames.

  Attributes:
    config: config of the model.

  Paper: Conformer, section 2, arXiv:2005.08100, for the convolution subsampling.
  """

  config: ConformerConfig

  @nn.compact
  def __call__(
    self, frames: Float[Array, "B S M"], mask: Bool[Array, "B S"] | None
  ) -> tuple[Float[Array, "B T F"], Bool[Array, "B T"] | None]:
    """Embeds frames of M bands; also returns the mask of unpadded positions."""
    config = self.config
    x = frames.astype(config.dtype)
    for i in range(_CONVOLUTIONS):
      x = without_padding(x, mask)
      dense = nn.Dense(
        config.features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        name=f"convolution_{i}",
      )
      length = -(-x.shape[1] // 2)
      x = jnp.pad(x, ((0, 0), (1, _KERNEL_SIZE), (0, 0)))
      taps = [x[:, j : j + 2 * length : 2] for j in range(_KERNEL_SIZE)]
      x = jax.nn.relu(dense(jnp.concatenate(taps, axis=-1)))
      mask = None if mask is None else mask[:, ::2]
    dense = nn.Dense(
      config.features,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      name="projection",
    )
    return without_padding(dense(x), mask), mask


class Extractor(nn.Module):
  """Convolutions over samples, a norm and a projection.

  Attributes:
    config: config of the model, with `extractor`.

  Paper: wav2vec 2.0, section 2, arXiv:2006.11477.
  """

  config: ConformerConfig

  @nn.compact
  def __call__(
    self, audio: Float[Array, "B S"], mask: Bool[Array, "B S"] | None
  ) -> tuple[Float[Array, "B T F"], Bool[Array, "B T"] | None]:
    """Embeds samples; also returns the mask of unpadded positions."""
    config, extractor = self.config, self.config.extractor
    assert extractor is not None  # Models of samples have an extractor.
    x = audio.astype(config.dtype)[..., None]
    dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    for i, (features, size, stride) in enumerate(
      zip(
        extractor.features,
        extractor.kernel_sizes,
        extractor.strides,
        strict=True,
      )
    ):
      x = nn.Conv(
        features,
        (size,),
        strides=(stride,),
        padding="VALID",
        use_bias=extractor.use_bias,
        name=f"convolution_{i}",
        **dtypes,
      )(x)
      if extractor.norm == "layer":
        x = nn.LayerNorm(epsilon=1e-5, name=f"norm_{i}", **dtypes)(x)
      elif i == 0:
        x = nn.GroupNorm(
          num_groups=features, epsilon=1e-5, name=f"norm_{i}", **dtypes
        )(x)
      x = ACTIVATIONS[extractor.activation](x)
    x = nn.LayerNorm(epsilon=config.norm_epsilon, name="norm", **dtypes)(x)
    x = nn.Dense(config.features, name="projection", **dtypes)(x)
    if mask is None:
      return x, None
    mask = position_mask(extractor, mask, x.shape[1])
    return without_padding(x, mask), mask


def position_mask(
  extractor: ExtractorConfig, mask: Bool[Array, "B S"], length: int
) -> Bool[Array, "B T"]:
  """Returns the mask of the `length` positions that do not depend on padding."""
  lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
  for size, stride in zip(
    extractor.kernel_sizes, extractor.strides, strict=True
  ):
    lengths = (lengths - size) // stride + 1
  return jnp.arange(length)[None, :] < lengths[:, None]


def without_padding(
  x: Float[Array, "B T F"], mask: Bool[Array, "B T"] | None
) -> Float[Array, "B T F"]:
  """Sets positions to zero where the mask is False."""
  return x if mask is None else jnp.where(mask[..., None], x, 0)
