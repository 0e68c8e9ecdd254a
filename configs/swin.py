"""Classification of images with shifted windows in stages (Swin)."""

from projects.vision.configs.swin import get_config

__all__ = ["get_config"]
