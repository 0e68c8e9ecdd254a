"""Recognition of dialled digits with CTC (Conformer)."""

from projects.speech.configs.conformer import get_config

__all__ = ["get_config"]
