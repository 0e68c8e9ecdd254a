"""Text, captions of images and control of a pole, as one task (Gato)."""

from tasks.mixed.config import MixedConfig
from tasks.mixed.task import MixedTask, make

__all__ = ["MixedConfig", "MixedTask", "make"]
