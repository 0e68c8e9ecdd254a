"""Masked language modelling of the bytes of a text (Perceiver IO)."""

from projects.perceiver.configs.perceiver_bytes import get_config

__all__ = ["get_config"]
