"""The config of a Transformer of images (ViT, DeiT), which checks itself."""

import dataclasses
import math
from typing import Any, ClassVar

from models.config import ModelConfig
from settings.fields import Count, check, check_unread, checked


@checked
class VitConfig(ModelConfig):
  """An encoder that reads square patches of images instead of tokens.

  Attributes:
    kind: 'vit'.
    patch_size: P, side of a patch.
    distillation: a second token of its own before the patches, with a head of
      its own (DeiT).
    image_shape: height, width and channels of the images that positions are
      learned for, if not those of its task.
    teacher: folder of weights, or a run, whose labels a run with `distillation`
      learns as well; '' in a model that is not trained.

  What is left is as in `ModelConfig`.

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
    # Distances along a row of patches mean nothing.
    known = ("learned", "sinusoidal", "none")
    check(self, "position", self.position in known, " or ".join(known))
    where = "kind is 'vit', which reads no tokens"
    tables = [field.name for field in dataclasses.fields(self.embedding)]
    check_unread(self.embedding, tables, where)
    check_unread(self.slot, ("global_projections",), where)

  def check_run(self) -> None:
    """Raises ValueError if a run cannot train this model."""
    if bool(self.teacher) != self.distillation:
      raise ValueError(
        "teacher: expected a folder of weights, or a run, with "
        "config.model.distillation=True and only then, got "
        f"{self.teacher!r}"
      )

  def adapt_task(self, task: Any) -> Any:
    """The task, with the labels of the teacher if there is one."""
    if not self.teacher:
      return task
    from projects.vision.distillation import with_teacher

    return with_teacher(task, self.teacher)

  @property
  def layout(self) -> str:
    """The batch layout that it reads."""
    return "encoder"

  def num_tokens(self, shape: tuple[int, ...]) -> int:
    """T for an image `(height, width, …)`."""
    return 1 + self.distillation + math.prod(self.grid(shape))

  def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of patches; ignores the rest of the image."""
    return shape[0] // self.patch_size, shape[1] // self.patch_size
