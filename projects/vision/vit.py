"""An encoder over image patches: ViT, and DeiT with a second special token."""

from collections.abc import Callable

from flax import linen as nn
from flax import traverse_util
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from models import nested
from models.block import Block, apply_layers
from models.head import Head
from models.kind import Sizes
from models.mechanism_variables import check_mechanisms
from models.multi_head_attention import apply_mechanism
from models.published.family import Description
from models.published.trained import with_biases
from projects.vision.maps import ImageModel
from projects.vision.patches import Patches, image_shape
from projects.vision.vit_config import VitConfig


class DistilledHead(Head):
  """Computes logits from [CLS] and from the distillation token (DeiT)."""

  def setup(self) -> None:
    """Creates both heads."""
    super().setup()
    config = self.config
    self.distilled = nn.Dense(
      self.size,
      use_bias=config.output.head_bias,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )

  def __call__(
    self, x: Float[Array, "B T F"], table: nn.Embed | None
  ) -> Float[Array, "B 2 V"]:
    """Returns the logits of one position per head."""
    first = super().__call__(x, table)
    second = self.distilled(x[:, 1:2])
    return jnp.concatenate([first, second.astype(first.dtype)], axis=1)


class VisionTransformer(ImageModel, nn.Module):
  """Maps images to logits of classes, or to features.

  Attributes:
    config: config of the model.
    target_vocab_size: V, the number of classes.
    image_shape: height, width and channels of the images for which positions are
      learned.
    attend: calls the mechanism of an attention module.
  """

  config: VitConfig
  target_vocab_size: int
  image_shape: tuple[int, int, int]
  attend: Callable[..., Array] = apply_mechanism

  @nn.nowrap
  def as_published(self, variables):
    """Returns the model's description and variables in a published family."""
    arrays = traverse_util.flatten_dict(dict(variables), sep="/")
    changes = with_biases(self.config, arrays)
    config = nested.replace(
      self.config, image_shape=self.image_shape, teacher="", **changes
    )
    description = Description(
      config,
      0,
      self.target_vocab_size,
      config.num_tokens(self.image_shape),
      {"image": self.image_shape},
    )
    tree = traverse_util.unflatten_dict(arrays, sep="/")
    return description, {"params": {}, "constants": {}, **tree}

  def setup(self) -> None:
    """Creates patches, layers and head."""
    config = self.config
    tokens = config.num_tokens(self.image_shape)
    self.patches = Patches(config, self.image_shape)
    self.encoder = [
      Block(config, mechanism, tokens, attend=self.attend)
      for mechanism in config.layers("encoder_attention")
    ]
    if config.norm != "post":
      self.encoder_norm = config.make_norm()
    head = DistilledHead if config.distillation else Head
    self.head = head(config, self.target_vocab_size)
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self, images: Float[Array, "B H W C"], *, deterministic: bool = True
  ) -> Float[Array, "B T V"]:
    """Computes the logits of the class of each image.

    Args:
      images: `[B, H, W, C]`; the size may differ from `image_shape` if no mechanism has
        variables per position.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.

    Returns:
      `[B, 1, V]`, with distillation `[B, 2, V]`, or with head 'hidden' features
      `[B, T, F]`.

    Raises:
      ValueError: the images have another number of channels, or are too small.
    """
    config = self.config
    x = self.patches(images)
    positions = np.arange(x.shape[1])[None, :]
    if added := config.added_position:
      x = x + added(positions, config.features).astype(x.dtype)
    x = self.dropout(x, deterministic=deterministic)
    x = apply_layers(
      self.encoder,
      x,
      remat=config.remat,
      positions=positions,
      deterministic=deterministic,
    )
    return self.head(x if config.norm == "post" else self.encoder_norm(x), None)


def create(config: VitConfig, sizes: Sizes) -> VisionTransformer:
  """Creates the model for a task's images, without computing anything.

  Raises:
    ValueError: the task has no images, the patches are larger than the images, or a
      mechanism does not support the number of patches.
  """
  shape = image_shape(config, sizes)
  if config.patch_size > min(shape[:2]):
    raise ValueError(
      f"patch_size: expected at most {min(shape[:2])}, the smaller side of the "
      f"images, got {config.patch_size}"
    )
  dims = config.dims(config.num_tokens(shape))
  for field, configs in config.attentions.items():
    check_mechanisms(field, configs, dims)
  return VisionTransformer(config, sizes.target_vocab_size, shape)
