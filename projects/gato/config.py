"""The config of Gato, which validates itself."""

from typing import ClassVar

from models.config import ModelConfig
from settings.fields import checked

PATCH_ID = -1
"""The id of inputs that represent the next patch of an image."""


@checked
class GatoConfig(ModelConfig):
  """A decoder over ids and patches of images.

  Attributes:
    kind: 'gato'.
    local_positions: whether a learned embedding of each token's position in its time
      step, which the task provides, is added.

  The other fields are those of `ModelConfig`.

  Paper: A generalist agent, arXiv:2205.06175.
  """

  kinds: ClassVar[tuple[str, ...]] = ("gato",)
  module: ClassVar[str] = "projects.gato.model:create"

  kind: str = "gato"
  local_positions: bool = True

  @property
  def layout(self) -> str:
    """The batch layout of a decoder."""
    return "decoder"
