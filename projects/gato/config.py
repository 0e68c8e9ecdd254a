"""The config of Gato, which validates itself."""

from typing import ClassVar

from models.config import ModelConfig
from settings.fields import checked

PATCH_ID = -1
"""The id of inputs that stand for the next patch of an image."""


@checked
class GatoConfig(ModelConfig):
  """A decoder that reads ids and patches of images.

  Attributes:
    kind: 'gato'.
    local_positions: adds to the embeddings a learned position of every token within
      its time step, which the task provides.

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
