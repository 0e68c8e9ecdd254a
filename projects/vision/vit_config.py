"""The config of an image Transformer (ViT, DeiT), which validates itself."""

import dataclasses
import math
from typing import Any, ClassVar

from models.config import ModelConfig
from settings.fields import Count, check, check_unread, checked


@checked
class VitConfig(ModelConfig):
  """An encoder over square patches of images instead of tokens.

  Attributes:
    kind: 'vit'.
    patch_size: P, side of a patch.
    distillation: whether a distillation token, with a separate head, precedes the
      patches (DeiT).
    image_shape: height, width and channels of the images for which positions are
      learned, if they differ from those of the task.
    teacher: folder of weights or of a run, whose predicted labels are further targets
      of a run with `distillation`; '' in a model that is not trained.

  The other fields are those of `ModelConfig`.

  Papers: An image is worth 16x16 words, arXiv:2010.11929; DeiT, arXiv:2012.12877.
  """

  kinds: ClassVar[tuple[str, ...]] = ("vit",)
  module: ClassVar[str] = "projects.vision.vit:create"

  kind: str = "vit"
  patch_size: Count
  distillation: bool = False
  image_shape: tuple[int, int, int] | None = None
  teacher: str = ""

  def __post_init__(self):
    super().__post_init__()
    check(self, "head", self.head in ("class", "hidden"), "class or hidden")
    # Distances in the sequence differ from distances in the image.
    supported = ("learned", "sinusoidal", "none")
    check(self, "position", self.position in supported, " or ".join(supported))
    reason = "kind is 'vit', which reads no tokens"
    tables = [field.name for field in dataclasses.fields(self.embedding)]
    check_unread(self.embedding, tables, reason)
    check_unread(self.slot, ("global_projections",), reason)

  def check_run(self) -> None:
    """Raises ValueError if a run cannot train this model."""
    if bool(self.teacher) != self.distillation:
      raise ValueError(
        "teacher: expected a folder of weights, or a run, with "
        "config.model.distillation=True and only then, got "
        f"{self.teacher!r}"
      )

  def adapt_task(self, task: Any) -> Any:
    """Adds the labels of the teacher to the task, if there is one."""
    if not self.teacher:
      return task
    from projects.vision.distillation import with_teacher

    return with_teacher(task, self.teacher)

  @property
  def layout(self) -> str:
    """The batch layout of an encoder."""
    return "encoder"

  def num_tokens(self, shape: tuple[int, ...]) -> int:
    """T for an image `(height, width, …)`."""
    return 1 + self.distillation + math.prod(self.grid(shape))

  def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of patches; ignores the rest of the image."""
    return shape[0] // self.patch_size, shape[1] // self.patch_size
