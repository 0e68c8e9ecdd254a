"""A decoder of several modalities, whose inputs are ids and patches of images."""

from typing import ClassVar, cast

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from models import embeddings
from models.kind import Sizes
from models.sizes import id_sizes
from models.transformer import OPTIONAL, Transformer
from projects.gato.config import PATCH_ID, GatoConfig
from projects.gato.maps import SharePictures
from projects.gato.patch_embedding import PatchEmbedding


class Gato(SharePictures, Transformer):
  """A decoder that replaces the ids `PATCH_ID` by embeddings of image patches.

  Attributes:
    patches_shape: rows, columns, height, width and channels of the patches of an
      image; None for a model without images.

  Paper: A generalist agent, sections 2.1 and 2.2, arXiv:2205.06175.
  """

  optional: ClassVar[tuple[str, ...]] = (*OPTIONAL, "local", "patches")

  patches_shape: tuple[int, int, int, int, int] | None = None

  @nn.nowrap
  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    batch = super().example()
    if self.patches_shape is not None:
      batch["patches"] = np.zeros((1, *self.patches_shape), np.float32)
    return batch

  def setup(self) -> None:
    """Creates the decoder, the table of local positions and the patch embedding."""
    super().setup()
    config = cast(GatoConfig, self.config)
    if config.local_positions:
      self.local_positions = embeddings.token_table(
        1 + self.max_target_length,
        config.features,
        config.dtype,
        config.param_dtype,
      )
    if self.patches_shape is not None:
      self.patch_embedding = PatchEmbedding(
        config.features, config.dtype, config.param_dtype
      )

  @nn.nowrap
  def lookup_ids(
    self, inputs: Int[Array, "B T"], mask: Bool[Array, "#B T"] | None
  ) -> Int[Array, "B T"]:
    """As in `Transformer`, except that `PATCH_ID` stays."""
    ids = super().lookup_ids(inputs, mask)
    return jnp.where(inputs == PATCH_ID, PATCH_ID, ids)

  def embed_inputs(
    self,
    inputs: Int[Array, "B T"],
    positions: Int[Array | np.ndarray, "B T"],
    deterministic: bool = True,
    local: Int[Array, "B T"] | None = None,
    patches: Float[Array, "B R C P P D"] | None = None,
  ) -> Float[Array, "B T F"]:
    """Computes embeddings of ids and of patches, with their positions.

    Args:
      inputs: ids; each `PATCH_ID` represents the next patch.
      positions: positions of the inputs in the sequence.
      deterministic: whether patches use the centres of their position intervals.
      local: for `local_positions`, the position of each input in its time step, from 1,
        or 0 for an action; None means its position in the sequence.
      patches: the patches of one image per row.
    """
    if patches is not None and self.patches_shape is None:
      raise ValueError(
        "patches: this model has none; expected `input_shapes` with 'patches'"
      )
    is_patch = inputs == PATCH_ID
    ids = jnp.where(is_patch, 0, inputs)
    x = super().embed_inputs(ids, positions, deterministic)
    if patches is not None:
      embedded = self.patch_embedding(patches, deterministic=deterministic)
      number = jnp.clip(jnp.cumsum(is_patch, axis=1) - 1, 0)
      embedded = jnp.take_along_axis(embedded, number[..., None], axis=1)
      x = jnp.where(is_patch[..., None], embedded, x)
    if cast(GatoConfig, self.config).local_positions:
      x = x + self.local_positions(1 + positions if local is None else local)
    return x


def create(config: GatoConfig, sizes: Sizes) -> Gato:
  """Creates the model for a task's sizes, without computing anything.

  Raises:
    ValueError: as in `models.sizes.id_sizes`.
  """
  shape = sizes.input_shapes.get("patches")
  return Gato(config, *id_sizes(config, sizes), patches_shape=shape)
