"""Classification of images: one label for a whole picture."""

from tasks.image.config import ImageConfig
from tasks.image.task import ImageTask, make

__all__ = ["ImageConfig", "ImageTask", "make"]
