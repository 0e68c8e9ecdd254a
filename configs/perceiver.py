"""Classification of images, pixel by pixel without patches (Perceiver IO)."""

from projects.perceiver.configs.perceiver import get_config

__all__ = ["get_config"]
