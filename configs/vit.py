"""Classification of images in patches (ViT)."""

from projects.vision.configs.vit import get_config

__all__ = ["get_config"]
