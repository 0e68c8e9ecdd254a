"""What Gato is made of; it checks itself."""

import dataclasses
from typing import Any, ClassVar

from models.config import ModelConfig
from models.kind import Sizes

PATCH_ID = -1
"""Id of an input that is the next patch of an image."""


@dataclasses.dataclass(frozen=True, kw_only=True)
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

  kind: str = "gato"
  local_positions: bool = True

  @property
  def layout(self) -> str:
    """Whose batches it reads."""
    return "decoder"

  def make(self, sizes: Sizes) -> Any:
    """The module for a task's sizes; see `models.create`."""
    from models.sizes import id_sizes
    from projects.gato.model import Gato

    shape = sizes.input_shapes.get("patches")
    return Gato(self, *id_sizes(self, sizes), patches_shape=shape)
