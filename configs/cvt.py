"""Classification of images by convolutions and attention (CvT)."""

from projects.vision.configs.cvt import get_config

__all__ = ["get_config"]
