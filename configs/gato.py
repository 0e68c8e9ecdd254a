"""Text, captions and control with one set of weights (Gato)."""

from projects.gato.configs.gato import get_config

__all__ = ["get_config"]
