"""The config of Gato, which checks itself."""

from typing import ClassVar

from models.config import ModelConfig
from settings.fields import checked

PATCH_ID = -1
"""Id of an input that is the next patch of an image."""


@checked
class GatoConfig(ModelConfig):
  """A decoder that reads patches of images among its ids.

  Attributes:
    kind: 'gato'.
    local_positions: adds a learned position of every token within its time step,
      which the task says, to the embeddings.

  What is left is as in `ModelConfig`.

  Paper: A generalist agent, arXiv:2205.06175.
  """

  kinds: ClassVar[tuple[str, ...]] = ("gato",)
  module: ClassVar[str] = "projects.gato.model:create"

  kind: str = "gato"
  local_positions: bool = True

  @property
  def layout(self) -> str:
    """The batch layout that it reads."""
    return "decoder"
