"""Classification of images in shifted windows and stages (Swin)."""

from projects.vision.configs.swin import get_config

__all__ = ["get_config"]
